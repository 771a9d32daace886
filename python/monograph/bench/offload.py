"""A checkpointed step over one long document, with its activations in memory and on disk.

    python -m monograph.bench offload --json                 # 32768 tokens, 8 layers of Qwen3-0.6B's width
    python -m monograph.bench offload --quick --json         # 2048 tokens, 4 layers; --tokens: other lengths

Each side is a process of its own that makes two steps; the second is measured. Anonymous memory (RssAnon) is
looked at every 3 ms: `idle` before the step, `kept` when the forward is done, `peak` over the whole step. The
activations' part is what lies above `idle`. Losses must have the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from monograph.bench.report import Report

FULL = {"tokens": 32768, "layers": 8, "vocabulary": 32768}
QUICK = {"tokens": 2048, "layers": 4, "vocabulary": 4096}
QWEN3_06B: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def _model(sizes: dict[str, int]) -> Any:
    import torch
    from peft import LoraConfig
    from transformers import Qwen3Config, Qwen3ForCausalLM

    import monograph as mg
    from monograph.hf.transformers import attention  # noqa: F401  (registers its name)
    from monograph.nn import replace_linears

    torch.manual_seed(0)
    settings = QWEN3_06B | {
        "num_hidden_layers": sizes["layers"],
        "vocab_size": sizes["vocabulary"],
        "max_position_embeddings": sizes["tokens"],
        "attn_implementation": "monograph",
    }
    model: Any = Qwen3ForCausalLM(Qwen3Config(**settings))
    model.to(torch.bfloat16)
    replace_linears(model, "nf4", double_quant=True)
    model.gradient_checkpointing_enable()
    return mg.add_lora(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))


def one_side(sizes: dict[str, int], mode: str, folder: str | None) -> dict[str, Any]:
    """Two steps in this process; the numbers of the second."""
    import torch

    from monograph.bench.shard_memory import Peak, status
    from monograph.packing import PackedCollator
    from monograph.training import TrainStep

    offload: dict[str, Any] = {} if folder is None else {"offload": "disk", "offload_folder": folder}
    step = TrainStep(_model(sizes), mode=mode, dynamic=False, **offload)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, sizes["vocabulary"], (sizes["tokens"],), generator=generator).tolist()
    batch = PackedCollator(max_documents=4)([{"input_ids": ids}])
    kept: list[int] = []
    # Called when the forward is done and its result still alive.
    original = step.micro_batch_loss

    def observed(*arguments: Any) -> Any:
        loss = original(*arguments)
        kept.append(status("RssAnon"))
        return loss

    step.micro_batch_loss = observed  # type: ignore[method-assign, assignment]
    step([batch], 1e-4)
    idle = status("RssAnon")
    before = None if step.offload is None else step.offload.counts()
    peak = Peak()
    peak.start()
    began = time.perf_counter()
    result = step([batch], 1e-4)
    seconds = time.perf_counter() - began
    highest = peak.end().anonymous
    numbers: dict[str, Any] = {
        "idle": idle,
        "kept": kept[-1] - idle,
        "peak": highest - idle,
        "seconds": seconds,
        "loss": result.loss.item(),
        "grad_norm": result.grad_norm.item(),
    }
    if step.offload is not None and before is not None:
        after = step.offload.counts()
        numbers |= {
            "writes": after.writes - before.writes,
            "reads": after.reads - before.reads,
            "bytes_written": after.bytes_written - before.bytes_written,
            "bytes_read": after.bytes_read - before.bytes_read,
        }
    return numbers


def _in_a_process(sizes: dict[str, int], mode: str, folder: str | None) -> dict[str, Any]:
    program = (
        "import json, sys; from monograph.bench.offload import one_side; "
        "print(json.dumps(one_side(*json.loads(sys.argv[1]))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps([sizes, mode, folder])],
        capture_output=True,
        text=True,
        check=False,
        # What is freed goes back at once, so that RssAnon is what is held, at any number of tokens.
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"},
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(arguments: argparse.Namespace, report: Report) -> None:
    sizes = QUICK if arguments.quick else FULL
    if arguments.tokens:
        sizes = sizes | {"tokens": arguments.tokens[0]}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        plain = _in_a_process(sizes, arguments.mode, None)
        disk = _in_a_process(sizes, arguments.mode, folder)
    if (plain["loss"], plain["grad_norm"]) != (disk["loss"], disk["grad_norm"]):
        raise RuntimeError(f"offload changed the step: {disk} instead of {plain}")
    numbers: dict[str, float] = {f"{k}_plain": v for k, v in plain.items()}
    numbers |= {f"{k}_disk": v for k, v in disk.items()}
    numbers["kept_ratio"] = disk["kept"] / plain["kept"]
    numbers["peak_ratio"] = disk["peak"] / plain["peak"]
    numbers["time_ratio"] = disk["seconds"] / plain["seconds"]
    report.summary(numbers | {name: float(size) for name, size in sizes.items()})
