"""A training step of QLoRA, against transformers + PEFT + bitsandbytes: time and memory.

Same packed bytes, documents, rank and AdamW for all. (a) 4 layers of Llama-3.1-8B width, 2048 tokens of
documents around 350, checkpointing; (b) 8 layers of Qwen3-0.6B width, 4 documents of 512; (lora) the same in
bf16, LoRA without quantisation; (recurrent) one GatedDeltaNet layer of Qwen3.5-4B width, one document of 2048
tokens, against the packed eager peers. Peers are
{packed, padded} x {eager, compiled} with TRL's chunked loss, and `*_logits` with the whole logits, which on a
CPU may be faster. Every contender is a process of its own; ours and one peer at a time are alive and step in
turn. `peak_MiB` is the largest sum of resident sets over its process tree from start to end, compilers
included. `--profile` adds where our step spends its time. Case `own` is in own_step.py: our eager step, our
compiled one, and each allowed compile option alone; `modes_a`, `modes_b` in modes_step.py.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from monograph.bench import modes_step, own_step
from monograph.bench.attention import log_normal_lengths
from monograph.bench.contenders import Contender, Measured, compare
from monograph.bench.plot import plot_step
from monograph.bench.report import Report
from monograph.bench.rounds import Paired

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
QWEN = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
# As wide as Qwen3.5-4B; the vocabulary is small, so that the layer is what is measured.
QWEN_RECURRENT = {
    "model_type": "qwen3_5_text",
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention"],
    "vocab_size": 4096,
    "tie_word_embeddings": True,
}

MODULE = "monograph.bench.step_contender"
QUICK_PEERS = ["packed_eager", "packed_eager_logits"]


def cases(quick: bool) -> dict[str, dict[str, Any]]:
    if quick:
        config = QWEN | {"num_hidden_layers": 2, "vocab_size": 32000}
        case = {"config": config, "lengths": [100, 156], "checkpointing": True}
        return {"quick": case, "quick_lora": case | {"dense": True}}
    return {
        "a": {
            "config": LLAMA | {"num_hidden_layers": 4},
            "lengths": log_normal_lengths(2048),
            "checkpointing": True,
        },
        "b": {"config": QWEN | {"num_hidden_layers": 8}, "lengths": [512] * 4, "checkpointing": False},
        "lora": {
            "config": QWEN | {"num_hidden_layers": 8},
            "lengths": [512] * 4,
            "checkpointing": False,
            "dense": True,
        },
        "recurrent": {
            "config": QWEN_RECURRENT | {"num_hidden_layers": 1},
            "lengths": [2048],
            "checkpointing": False,
            "peers": QUICK_PEERS,
        },
    }


def peers() -> dict[str, dict[str, Any]]:
    found = {}
    for loss in ("", "_logits"):
        for packed in ("packed", "padded"):
            for how in ("eager", "compiled"):
                options = {"packed": packed == "packed", "compiled": how == "compiled"}
                found[f"{packed}_{how}{loss}"] = options | {"chunked_loss": loss == ""}
    return found


# A random dense model at argv[2]/dense, by the config argv[1].
MAKE_DENSE = """
import json, sys, torch, transformers, monograph as mg
config, folder = json.loads(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
config = transformers.AutoConfig.for_model(**config, max_position_embeddings=8192)
model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model.save_pretrained(folder + "/dense")
del model
"""

_MAKE = (
    MAKE_DENSE
    + """
model = transformers.AutoModelForCausalLM.from_pretrained(
    folder + "/dense", quantization_config=mg.MonographConfig("nf4", double_quant=True), dtype=torch.bfloat16
)
model.save_pretrained(folder + "/packed")
"""
)


def make_folder(config: dict[str, Any], folder: pathlib.Path, keep_dense: bool = False) -> str:
    """A random model in bitsandbytes' own files, made once; what it was made of may stay beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "packed" / "config.json").exists():
        command = [sys.executable, "-c", _MAKE, json.dumps(config), str(folder)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for file in () if keep_dense else (folder / "dense").iterdir():
            file.unlink()
    return str(folder / "packed")


def make_dense_folder(config: dict[str, Any], folder: pathlib.Path) -> str:
    """A random model in bf16, made once."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "dense" / "config.json").exists():
        command = [sys.executable, "-c", MAKE_DENSE, json.dumps(config), str(folder)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return str(folder / "dense")


def measure(job: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Measured]:
    ours = Contender(job | {"contender": "ours", "mode": "graph"}, MODULE)
    found = {"ours": Measured(ours.start)}
    wanted = arguments.peers or (QUICK_PEERS if arguments.quick else job.get("peers") or list(peers()))
    for peer, options in peers().items():
        if peer in wanted:
            other = Contender(job | options | {"contender": peer}, MODULE)
            loss, own_loss = other.start["loss"], ours.start["loss"]
            if abs(loss / own_loss - 1) > 0.01:
                raise RuntimeError(f"{peer}: first loss {loss}, ours {own_loss}")
            found[peer] = compare(ours, found["ours"], other, 2 if arguments.quick else 5)
            ratio, processor = (
                statistics.median(r) for r in (found[peer].ratio, found[peer].processor_ratio)
            )
            print(f"  {peer}: {ratio:.2f}x, processor time {processor:.2f}x", file=sys.stderr, flush=True)
    if arguments.profile:
        for operator, ms, calls in ours.ask("profile")["profile"]:
            print(f"  {ms:10.1f} ms {calls:6d} x {operator}", file=sys.stderr)
    ours.end()
    found["ours"].peak = ours.peak
    return found


def numbers(prefix: str, tokens: int, found: dict[str, Measured]) -> dict[str, float]:
    summary = {}
    for name, contender in found.items():
        summary[f"{prefix}_{name}_tokens_per_s"] = tokens / min(contender.ms) * 1e3
        summary[f"{prefix}_{name}_peak_MiB"] = contender.peak / 2**20
        summary[f"{prefix}_{name}_load_s"] = contender.start["load_s"]
        summary[f"{prefix}_{name}_first_step_s"] = contender.start["first_step_s"]
    rivals = {name: contender for name, contender in found.items() if name != "ours"}
    chunked = {name: contender for name, contender in rivals.items() if not name.endswith("_logits")}
    for label, group in (("chunked", chunked), ("all", rivals)):
        if not group:
            continue
        fastest = min(group.values(), key=lambda c: statistics.median(c.ratio))
        processor = min(statistics.median(c.processor_ratio) for c in group.values())
        summary[f"{prefix}_over_fastest_{label}"] = statistics.median(fastest.ratio)
        summary[f"{prefix}_processor_time_over_least_{label}"] = processor
        summary[f"{prefix}_memory_over_fastest_{label}"] = found["ours"].peak / fastest.peak
        summary[f"{prefix}_memory_over_leanest_{label}"] = found["ours"].peak / min(
            c.peak for c in group.values()
        )
    return summary


def run(arguments: argparse.Namespace, report: Report) -> None:
    summary: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary:
        root = pathlib.Path(arguments.folder or temporary)
        for name, case in cases(arguments.quick).items():
            if arguments.case and name not in arguments.case:
                continue
            make = make_dense_folder if case.get("dense") else make_folder
            folder = make(case["config"], root / name)
            for threads in arguments.threads[:1] if arguments.quick else arguments.threads:
                job = {"folder": folder, "threads": threads, "lengths": case["lengths"]}
                job["peers"] = case.get("peers")
                found = measure(job | {"checkpointing": case["checkpointing"], "case": name}, arguments)
                best = {contender: min(measured.ms) for contender, measured in found.items()}
                ratio = {n: statistics.median(m.ratio) for n, m in found.items() if n != "ours"}
                tokens = sum(case["lengths"])
                line = {"case": name, "tokens": tokens, "threads": threads}
                report.case(line, Paired(best, ratio, 0, 0.0), "ours")
                summary |= numbers(f"{name}_{threads}_threads", tokens, found)
        if "own" in (arguments.case or ([] if arguments.quick or arguments.peers else ["own"])):
            folder = make_folder(own_step.CONFIG, root / "own")
            summary |= own_step.measure(folder, arguments.threads[0], arguments, report)
        for name in ("a", "b"):
            if f"modes_{name}" in (arguments.case or []):
                case = cases(False)[name]
                job = {"folder": make_folder(case["config"], root / name), "threads": arguments.threads[-1]}
                job |= {"lengths": case["lengths"], "checkpointing": case["checkpointing"]}
                summary |= modes_step.measure(f"modes_{name}", job, report)
    report.summary(summary)
    if arguments.plot:
        plot_step(report.lines, summary, arguments.plot)
