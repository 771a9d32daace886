"""`monograph export` to K-quants, against ggml's own encoders on the same values.

A Llama of random weights in bf16, one thread, processor seconds. Ours is the whole command: reading,
encoding, writing. The peer is what llama-quantize spends its time in, `ggml_quantize_chunk` of PyPI's
xllamacpp, called for every tensor with the type that it has in our file, on float32 that is in memory
already; llama-quantize itself reads and writes besides, so that its speed is no higher. Cases that are
calibrated round with error feedback along sketches of rank 64; the peer is the same.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import pathlib
import resource
import shutil
import statistics
import subprocess
import time
from typing import Any

import torch

from monograph.bench.quantize_file import tool_path
from monograph.bench.report import Report
from monograph.bench.rounds import Paired

KINDS = ("q8_0", "q4_k_m", "q5_k_m", "q6_k")
# How Llama 3 cuts text into words.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_llama(folder: pathlib.Path, layers: int, width: int) -> dict[str, torch.Tensor]:
    """The folder, and its matrices by llama.cpp's names in float32."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    vocabulary, keys, wide = 512, width // 4, 11 * width // 4
    shapes = {"q": (width, width), "k": (keys, width), "v": (keys, width), "o": (width, width)}
    state: dict[str, torch.Tensor] = {"model.norm.weight": torch.ones(width, dtype=torch.bfloat16)}
    matrices: dict[str, torch.Tensor] = {}

    def add(name: str, theirs: str, rows: int, cols: int) -> None:
        weight = (torch.randn(rows, cols, generator=generator) * 0.02).bfloat16()
        state[name + ".weight"], matrices[theirs + ".weight"] = weight, weight.float()

    add("model.embed_tokens", "token_embd", vocabulary, width)
    add("lm_head", "output", vocabulary, width)
    for i in range(layers):
        layer, block = f"model.layers.{i}.", f"blk.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            state[f"{layer}{norm}.weight"] = torch.ones(width, dtype=torch.bfloat16)
        for part, (rows, cols) in shapes.items():
            theirs = "attn_output" if part == "o" else f"attn_{part}"
            add(f"{layer}self_attn.{part}_proj", block + theirs, rows, cols)
        for part in ("gate", "up"):
            add(f"{layer}mlp.{part}_proj", f"{block}ffn_{part}", wide, width)
        add(f"{layer}mlp.down_proj", block + "ffn_down", width, wide)
    folder.mkdir(parents=True)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = {
        "model_type": "llama", "hidden_size": width, "intermediate_size": wide, "num_hidden_layers": layers,
        "num_attention_heads": width // 64, "num_key_value_heads": width // 256, "vocab_size": vocabulary,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "eos_token_id": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder / "tokenizer.json", vocabulary)
    return matrices


def write_tokenizer(path: pathlib.Path, vocabulary: int) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = letters + [a + b for a in letters[:16] for b in letters[:16]][: vocabulary - len(letters)]
    merges = [(name[0], name[1]) for name in names[len(letters) :]]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))


def write_calibration(path: pathlib.Path, layers: int, width: int) -> None:
    """Random inputs of every linear layer."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(1)
    inputs = {f"self_attn.{part}_proj": width for part in "qkvo"}
    inputs |= {"mlp.gate_proj": width, "mlp.up_proj": width, "mlp.down_proj": 11 * width // 4}
    state: dict[str, torch.Tensor] = {}
    for i in range(layers):
        for module, columns in inputs.items():
            sketch = torch.randn(64, columns, generator=generator)
            state[f"model.layers.{i}.{module}.sketch"] = sketch
            state[f"model.layers.{i}.{module}.diagonal"] = sketch.square().sum(0) * 1.1
    save_file(state, path, {"monograph.calibration": "1"})


def our_seconds(
    source: pathlib.Path, target: pathlib.Path, kind: str, calibration: pathlib.Path | None = None
) -> float:
    """Processor seconds of the command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [tool_path(), "export", source, target, "--type", kind, "--jobs", "1", "--force", "--quiet"]
    command += ["--calibration", calibration] if calibration else []
    subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


class Ggml:
    """Its encoders, as xllamacpp has them."""

    def __init__(self) -> None:
        found = importlib.util.find_spec("xllamacpp")
        if found is None or not found.submodule_search_locations:
            raise SystemExit("export_gguf: xllamacpp is not there; pip install xllamacpp")
        folder = pathlib.Path(next(iter(found.submodule_search_locations)))
        self._library: Any = ctypes.CDLL(str(folder / "xllamacpp.abi3.so"))
        self._library.ggml_quantize_chunk.restype = ctypes.c_size_t

    def seconds(self, weights: list[tuple[int, torch.Tensor]], out: torch.Tensor) -> float:
        """Processor seconds for all weights, each with the number of its type, into `out`."""
        start = time.process_time()
        for kind, weight in weights:
            sizes = [ctypes.c_int64(size) for size in (0, *weight.shape)]
            pointers = ctypes.c_void_p(weight.data_ptr()), ctypes.c_void_p(out.data_ptr())
            self._library.ggml_quantize_chunk(kind, *pointers, *sizes, None)
        return time.process_time() - start


def run(arguments: argparse.Namespace, report: Report) -> None:
    import gguf

    ggml = Ggml()
    root = pathlib.Path(arguments.folder or "build/export-gguf")
    shutil.rmtree(root / "source", ignore_errors=True)
    layers, width, rounds = (1, 1024, 3) if arguments.quick else (1, 2048, 5)
    matrices = write_llama(root / "source", layers, width)
    elements = sum(weight.numel() for weight in matrices.values())
    out = torch.empty(max(weight.numel() for weight in matrices.values()) * 2, dtype=torch.uint8)
    target, calibration = root / "it.gguf", root / "calibration.safetensors"
    write_calibration(calibration, layers, width)
    ratios: dict[str, float] = {}
    try:
        for kind in KINDS:
            our_seconds(root / "source", target, kind)
            weights = [
                (int(tensor.tensor_type), matrices[tensor.name])
                for tensor in gguf.GGUFReader(target).tensors
                if tensor.name in matrices
            ]
            times: dict[str, list[float]] = {"ggml": [], "plain": [], "calibrated": []}
            for _ in range(rounds):
                times["ggml"].append(1e3 * ggml.seconds(weights, out))
                times["plain"].append(1e3 * our_seconds(root / "source", target, kind))
                times["calibrated"].append(1e3 * our_seconds(root / "source", target, kind, calibration))
            for how in ("plain", "calibrated"):
                pairs = zip(times["ggml"], times[how], strict=True)
                ratio = statistics.median(theirs / ours for theirs, ours in pairs)
                best = {"ours": min(times[how]), "ggml": min(times["ggml"])}
                case = {
                    "type": kind,
                    "rounding": how,
                    "million_weights": round(elements / 1e6, 1),
                    "threads": 1,
                }
                paired = Paired(best_ms=best, ratio={"ggml": ratio}, repeated=0, tile_tflops=0)
                report.case(case, paired, "ours")
                ratios[f"ggml_{kind}" + ("" if how == "plain" else "_calibrated")] = ratio
    finally:
        shutil.rmtree(root / "source", ignore_errors=True)
        target.unlink(missing_ok=True)
        calibration.unlink(missing_ok=True)
    report.summary(ratios)
