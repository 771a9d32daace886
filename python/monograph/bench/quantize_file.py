"""`monograph quantize` on a model folder, against copying the same files and against bitsandbytes.

An 8-billion-parameter Llama in bf16, four files of 4 GB (--quick: 1 GB in all) of random weights, to NF4 with
double-quantised scales. `cp` copies the same files and syncs them; each round runs both from the same cache
state: cold, the source dropped from the page cache, and warm. bitsandbytes quantises a slice in memory, no
files: its rate is scaled to the weights that are quantised. The summary has the peak of our anonymous memory,
and seconds and memory of `dequantize` and `merge` on the result: into bf16, and into NF4 with two roundings.
Needs 40 GB of disk (--quick: 3) under --folder.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import statistics
import struct
import subprocess
import time
from collections.abc import Iterator

import torch

from monograph.bench.report import Report
from monograph.bench.rounds import Paired

Shapes = dict[str, tuple[int, int]]


def llama_shapes(layers: int, vocabulary: int) -> Shapes:
    """The weights of Llama 3 8B, with fewer layers or a smaller vocabulary."""
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, 4096), "lm_head.weight": (vocabulary, 4096)}
    for i in range(layers):
        attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        for name, rows in {"q_proj": 4096, "k_proj": 1024, "v_proj": 1024, "o_proj": 4096}.items():
            shapes[f"{attention}{name}.weight"] = (rows, 4096)
        for name in ("gate_proj", "up_proj"):
            shapes[f"{mlp}{name}.weight"] = (14336, 4096)
        shapes[f"{mlp}down_proj.weight"] = (4096, 14336)
    return shapes


def _shards(shapes: Shapes, count: int) -> Iterator[Shapes]:
    """Cuts the list into `count` parts of about the same size, in order."""
    wanted = sum(rows * cols for rows, cols in shapes.values()) / count
    part: Shapes = {}
    done = filled = 0
    for name, (rows, cols) in shapes.items():
        part[name] = (rows, cols)
        filled += rows * cols
        if filled >= wanted * (done + 1) and done + 1 < count:
            yield part
            part, done = {}, done + 1
    yield part


def write_model(folder: pathlib.Path, shapes: Shapes, shards: int) -> None:
    """Random normal weights in bf16, written without holding more than 64 MB."""
    folder.mkdir(parents=True)
    noise = (torch.randn(32 << 20, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    block = noise.view(torch.uint8).numpy().tobytes()
    weight_map: dict[str, str] = {}
    for number, part in enumerate(_shards(shapes, shards), 1):
        name = f"model-{number:05}-of-{shards:05}.safetensors"
        header, end = {}, 0
        for tensor, (rows, cols) in part.items():
            header[tensor] = {
                "dtype": "BF16",
                "shape": [rows, cols],
                "data_offsets": [end, end + 2 * rows * cols],
            }
            end += 2 * rows * cols
            weight_map[tensor] = name
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / name, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for begin in range(0, end, len(block)):
                file.write(block[: min(len(block), end - begin)])
            file.flush()
            os.fsync(file.fileno())
    index = {"metadata": {"total_size": sum(2 * r * c for r, c in shapes.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "llama", "dtype": "bfloat16"}\n')


def tool_path() -> str:
    for path in (os.environ.get("MONOGRAPH_TOOL"), shutil.which("monograph"), "build/release/cli/monograph"):
        if path and os.path.exists(path):
            return path
    raise SystemExit("the program monograph is not there: build it, install the wheel, or set MONOGRAPH_TOOL")


def _drop_from_cache(folder: pathlib.Path) -> None:
    for file in folder.glob("*.safetensors"):
        with open(file, "rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_into_cache(folder: pathlib.Path) -> None:
    for file in folder.glob("*.safetensors"):
        with open(file, "rb", buffering=0) as opened:
            while opened.read(1 << 24):
                pass


def copy_ms(source: pathlib.Path, target: pathlib.Path) -> float:
    """`cp` of the folder, then fsync of every file."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    for file in target.iterdir():
        with open(file, "rb+") as opened:
            os.fsync(opened.fileno())
    elapsed = 1e3 * (time.perf_counter() - start)
    shutil.rmtree(target)
    return elapsed


def tool_ms(*arguments: object) -> tuple[float, int]:
    """Milliseconds of `monograph ARGUMENTS`, and the peak of RssAnon in bytes, looked at every 5 ms."""
    command = [tool_path(), *map(str, arguments), "--quiet"]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        try:
            with open(f"/proc/{process.pid}/status") as status:
                peak = max(
                    [peak] + [1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon")]
                )
        except (FileNotFoundError, ProcessLookupError):
            pass
        time.sleep(0.005)
    process.wait()
    elapsed = 1e3 * (time.perf_counter() - start)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    return elapsed, peak


def write_adapter(folder: pathlib.Path, shapes: Shapes, rank: int = 16) -> None:
    """A PEFT adapter of random numbers on every linear layer."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    for name, (rows, cols) in shapes.items():
        if "layers" in name:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            for part, shape in {"lora_A": (rank, cols), "lora_B": (rows, rank)}.items():
                tensors[f"{module}.{part}.weight"] = torch.randn(shape, generator=generator) * 0.01
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.split(".")[-2] for name in shapes if "layers" in name})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def others(root: pathlib.Path, source: pathlib.Path, shapes: Shapes, threads: int) -> dict[str, float]:
    """`dequantize` of what quantize wrote, `merge` of an adapter onto it: seconds and peak memory."""
    jobs = ("--jobs", threads)
    packed, adapter, out = root / "quantised", root / "adapter", root / "out"
    tool_ms("quantize", source, packed, "--double-quant", *jobs)
    write_adapter(adapter, shapes)
    numbers: dict[str, float] = {}
    merging = ("merge", packed, "--adapter", adapter, "--base", "dequantized", "--out", out, "--to")
    four_bits = (*merging, "nf4", "--double-quant", "--rounding")
    commands: dict[str, tuple[object, ...]] = {
        "dequantize": ("dequantize", packed, out),
        "merge": (*merging, "bf16"),
        "merge_nearest": (*four_bits, "nearest"),
        "merge_adapter": (*four_bits, "adapter"),
    }
    for name, command in commands.items():
        elapsed, peak = tool_ms(*command, *jobs)
        numbers |= {f"{name}_seconds": elapsed / 1e3, f"{name}_anonymous_gib": peak / 2**30}
        shutil.rmtree(out)
    return numbers


def bitsandbytes_ms(shapes: Shapes, threads: int) -> float:
    """A slice of one layer in memory, scaled to all weights that are quantised."""
    import bitsandbytes

    torch.set_num_threads(threads)
    weight = (torch.randn(1024, 4096) * 0.02).bfloat16()
    bitsandbytes.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    rounds = []
    for _ in range(3):
        start = time.perf_counter()
        bitsandbytes.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        rounds.append(1e3 * (time.perf_counter() - start))
    packed = sum(rows * cols for name, (rows, cols) in shapes.items() if "layers" in name)
    return statistics.median(rounds) * packed / weight.numel()


def run(arguments: argparse.Namespace, report: Report) -> None:
    shapes = llama_shapes(2, 8192) if arguments.quick else llama_shapes(32, 128256)
    size = sum(2 * rows * cols for rows, cols in shapes.values())
    root = pathlib.Path(arguments.folder or "build/quantize-file")
    root.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(root).free < 2.4 * size:
        print(f"quantize_file: skipped, {root} has no room for {2.4 * size / 1e9:.0f} GB")
        return
    source = root / "source"
    shutil.rmtree(source, ignore_errors=True)
    threads, peak = arguments.threads[-1], 0
    ratios: dict[str, float] = {}
    try:
        write_model(source, shapes, 4)
        bnb_ms = bitsandbytes_ms(shapes, threads)
        for cache in ("cold", "warm"):
            times: dict[str, list[float]] = {"ours": [], "cp": [], "bitsandbytes": []}
            for _ in range(3 if arguments.quick else 1):
                for name in ("cp", "ours"):
                    (_drop_from_cache if cache == "cold" else _read_into_cache)(source)
                    if name == "cp":
                        times[name].append(copy_ms(source, root / "copy"))
                    else:
                        target = root / "quantised"
                        elapsed, anonymous = tool_ms(
                            "quantize", source, target, "--double-quant", "-j", threads
                        )
                        shutil.rmtree(target)
                        times[name].append(elapsed)
                        peak = max(peak, anonymous)
                times["bitsandbytes"].append(bnb_ms)
            ratio = {
                name: statistics.median(p / o for p, o in zip(times[name], times["ours"], strict=True))
                for name in ("cp", "bitsandbytes")
            }
            best = {name: min(values) for name, values in times.items()}
            case = {"gb": round(size / 1e9, 2), "format": "nf4+dq", "cache": cache, "threads": threads}
            report.case(case, Paired(best_ms=best, ratio=ratio, repeated=0, tile_tflops=0), "ours")
            ratios |= {f"{name}_{cache}": value for name, value in ratio.items()}
        ratios |= others(root, source, shapes, threads)
    finally:
        for name in ("source", "quantised", "adapter", "out"):
            shutil.rmtree(root / name, ignore_errors=True)
    report.summary({**ratios, "peak_anonymous_gib": peak / 2**30})
