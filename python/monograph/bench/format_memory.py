"""Memory of training on a packed base in each format, against the same weights expanded to 16 bits.

    python -m monograph.bench format_memory --threads 2 --json

4 layers of Llama-3.1-8B width, a vocabulary of 32,000, 1024 tokens, r = 16 on all linears, checkpointing.
Random weights, quantised and saved; the expansion is the dequantised model, saved in bf16. Each trains in a
process of its own, both mapped from the file, and must show the same loss. `resident` is the high-water mark
of that process from its start through three steps; compilers, which are other processes, are not in it.
`anonymous` is what it holds after them beyond the pages of files, which the system may drop and read again.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from monograph.bench.contenders import Contender
from monograph.bench.report import Report
from monograph.bench.step import LLAMA, MAKE_DENSE, MODULE, QWEN

FORMATS = ("mxfp4", "nvfp4", "mxfp8", "fp8-block")

_MAKE = (
    MAKE_DENSE
    + """
for name in sys.argv[3:]:
    model = mg.from_pretrained(folder + "/dense", mg.MonographConfig(name))
    model.save_pretrained(folder + "/" + name)
    model.dequantize(torch.bfloat16).save_pretrained(folder + "/" + name + "-bf16")
    del model
"""
)


def _weight_bytes(folder: pathlib.Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _train(folder: pathlib.Path, job: dict[str, Any]) -> dict[str, float]:
    """The memory of a process that trained on `folder`, in MiB, and its first loss."""
    job = job | {"folder": str(folder), "contender": "ours", "checkpointing": True}
    contender = Contender(job, MODULE)
    contender.ask("step")
    found = contender.ask("memory")
    contender.end()
    return found | {"loss": contender.start["loss"], "file": _weight_bytes(folder) / 2**20}


def measure(root: pathlib.Path, name: str, job: dict[str, Any]) -> dict[str, float]:
    packed, dense = (_train(root / folder, job) for folder in (name, f"{name}-bf16"))
    if abs(packed["loss"] / dense["loss"] - 1) > 0.01:
        raise RuntimeError(f"{name}: first loss {packed['loss']}, expanded {dense['loss']}")
    numbers = {"resident_over_16_bit": packed["resident"] / dense["resident"]}
    for label, found in (("packed", packed), ("16_bit", dense)):
        for kind in ("resident", "anonymous", "file"):
            numbers[f"{label}_{kind}_MiB"] = found[kind]
    return {f"{name}_{key}": value for key, value in numbers.items()}


def run(arguments: argparse.Namespace, report: Report) -> None:
    config = LLAMA | {"num_hidden_layers": 4, "vocab_size": 32000}
    lengths = [350, 350, 324]
    if arguments.quick:
        config = QWEN | {"num_hidden_layers": 2, "vocab_size": 4096}
        lengths = [100, 156]
    summary: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        command = [sys.executable, "-c", _MAKE, json.dumps(config), temporary, *FORMATS]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for name in FORMATS:
            job = {"threads": arguments.threads[-1], "lengths": lengths, "mode": arguments.mode}
            summary |= measure(pathlib.Path(temporary), name, job)
    report.summary(summary)
