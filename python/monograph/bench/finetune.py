"""`monograph finetune` against `monograph train` in graph mode: one recipe and its tokens, the same adapter.

`step`: a Llama of 8 layers of width 1024 in NF4, LoRA of rank 16, checkpointed, 1024 packed tokens. Whole
runs take turns; a round's figure is the median of its steps after the first two, which trace and warm up.
`start`: a tiny model, from the start of the process to its end with one step behind it and the adapter
written. The peak is what either writes into metrics.jsonl, the most memory that the process had. Adapters
that differ are an error.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from monograph.bench.export_gguf import write_tokenizer
from monograph.bench.quantize_file import tool_path
from monograph.bench.report import Report
from monograph.bench.rounds import Paired

WIDE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
VOCABULARY, UNTIMED = 512, 2


def write_world(root: pathlib.Path, sizes: dict[str, int], length: int, steps: int) -> None:
    """A packed base, documents, a recipe and its tokens."""
    import torch
    import yaml
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    keys: dict[str, Any] = sizes | {"vocab_size": VOCABULARY, "eos_token_id": 0}
    model: Any = LlamaForCausalLM(LlamaConfig(**keys, num_key_value_heads=sizes["num_attention_heads"] // 2))
    model.to(torch.bfloat16).save_pretrained(root / "model")
    write_tokenizer(root / "words.json", VOCABULARY)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(root / "words.json"), eos_token="!", pad_token="!")
    tokenizer.save_pretrained(root / "model")
    _run([tool_path(), "quantize", root / "model", root / "nf4", "--to", "nf4", "--double-quant"])
    count = 4 * steps
    rows = [{"instruction": f"Say {n}", "output": f"{n} times " * (length // 24)} for n in range(count)]
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "base_model": str(root / "nf4"), "adapter": "qlora", "lora_target_linear": True, "lora_r": 16,
        "datasets": [{"path": str(root / "train.jsonl"), "type": "instruction"}],
        "dataset_prepared_path": str(root / "prepared"), "sequence_len": length, "sample_packing": True,
        "excess_length_strategy": "truncate", "gradient_checkpointing": True, "step_mode": "graph",
        "learning_rate": 0.001, "num_epochs": 100, "max_steps": steps, "save_strategy": "no",
        "output_dir": str(root / "python"),
    }  # fmt: skip
    (root / "recipe.yml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    _python(root, 1, "preprocess", root / "recipe.yml", "--tokens", root / "tokens.safetensors", "--quiet")


def _run(command: list[Any], **environment: str) -> float:
    start = time.perf_counter()
    done = subprocess.run(
        [str(part) for part in command],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stderr[-3000:]}")
    return time.perf_counter() - start


def _python(root: pathlib.Path, threads: int, *arguments: Any) -> float:
    return _run([sys.executable, "-m", "monograph", *arguments], OMP_NUM_THREADS=str(threads))


def one_run(root: pathlib.Path, who: str, threads: int) -> tuple[float, list[float], float]:
    """Seconds of the whole run, of its steps, and GiB at its peak."""
    out = root / who
    shutil.rmtree(out, ignore_errors=True)
    if who == "python":
        seconds = _python(root, threads, "train", root / "recipe.yml", "--quiet")
    else:
        tokens = ["--tokens", root / "tokens.safetensors"]
        command = [tool_path(), "finetune", root / "recipe.yml", *tokens, "--output-dir", out]
        seconds = _run([*command, "--threads", threads])
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line["tokens"] / line["tokens_per_second"] for line in lines]
    return seconds, steps, max(line["memory_gib"] for line in lines)


def _compared(root: pathlib.Path, threads: int) -> dict[str, tuple[float, list[float], float]]:
    found = {who: one_run(root, who, threads) for who in ("native", "python")}
    files = [(root / who / "adapter_model.safetensors").read_bytes() for who in found]
    if files[0] != files[1]:
        raise RuntimeError(f"the adapters in {root} differ")
    return found


def run(arguments: argparse.Namespace, report: Report) -> None:
    rounds, layers = (2, 1) if arguments.quick else (5, WIDE["num_hidden_layers"])
    steps = UNTIMED + (arguments.steps or (2 if arguments.quick else 6))
    numbers: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        root = pathlib.Path(folder)
        for part in ("tiny", "wide"):
            (root / part).mkdir()
        write_world(root / "tiny", TINY, 96, 1)
        write_world(root / "wide", WIDE | {"num_hidden_layers": layers}, 1024, steps)
        for threads in arguments.threads:
            for name, part in (("start", "tiny"), ("step", "wide")):
                if arguments.case and name not in arguments.case:
                    continue
                times: dict[str, list[float]] = {"native": [], "python": []}
                for _ in range(rounds):
                    found = _compared(root / part, threads)
                    for who, (seconds, each, peak) in found.items():
                        timed = seconds if name == "start" else statistics.median(each[UNTIMED:])
                        times[who].append(1e3 * timed)
                        if name == "step":
                            numbers[f"{who}_peak_gib"] = peak
                pairs = zip(times["python"], times["native"], strict=True)
                ratio = statistics.median(theirs / ours for theirs, ours in pairs)
                best = {who: min(values) for who, values in times.items()}
                paired = Paired(best, {"python": ratio}, 0, 0.0)
                report.case({"case": name, "threads": threads, "rounds": rounds}, paired, "native")
                numbers[f"python_over_native_{name}_{threads}_threads"] = ratio
    if "native_peak_gib" in numbers:
        numbers["peak_of_python"] = numbers["native_peak_gib"] / numbers["python_peak_gib"]
    report.summary(numbers)
