"""NF4 to bf16, block 64: ours, plain and double-quantised, against bitsandbytes and the bare traffic.

`memory` is `fresh` (the output is a new mapping each time, mostly page faults) or `warm` (recycled memory on
every side, glibc's thresholds raised); `copy` is a loop that moves the same bytes without arithmetic.
"""

from __future__ import annotations

import argparse

import torch

import monograph as mg
from monograph.bench.memory import recycle_large_blocks
from monograph.bench.report import Report
from monograph.bench.rounds import Paired, Work, geometric_mean, paired_rounds

SHAPES = [(4096, 4096), (14336, 4096)]


def _measure(rows: int, cols: int, memory: str, rounds: int) -> Paired:
    weight = (torch.randn(rows, cols) * 0.02).bfloat16()
    plain, double = mg.quantize(weight), mg.quantize(weight, double_quant=True)
    values, absmax = torch.ops.bitsandbytes.quantize_4bit(weight, 64, "nf4", torch.uint8)
    out = torch.zeros(rows, cols, dtype=torch.bfloat16)

    def bitsandbytes() -> object:
        return torch.ops.bitsandbytes.dequantize_4bit(values, absmax, 64, "nf4", (rows, cols), torch.bfloat16)

    def copy() -> object:
        to = out if memory == "warm" else torch.empty_like(out)
        return torch.ops.monograph.limit_move(plain.values, to)

    works: dict[str, Work] = {
        "ours": lambda: plain.dequantize(torch.bfloat16),
        "double": lambda: double.dequantize(torch.bfloat16),
        "bitsandbytes": bitsandbytes,
        "copy": copy,
    }
    if memory == "warm":
        works["ours"] = lambda: plain.dequantize(out=out)
        works["double"] = lambda: double.dequantize(out=out)
        works["allocating"] = lambda: plain.dequantize(torch.bfloat16)
    return paired_rounds(works, "ours", rounds)


def run(arguments: argparse.Namespace, report: Report) -> None:
    import bitsandbytes  # noqa: F401  (registers its ops)

    ratios: dict[str, list[float]] = {}
    for memory in ("fresh", "warm"):
        if memory == "warm":
            recycle_large_blocks()
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            for rows, cols in SHAPES[:1] if arguments.quick else SHAPES:
                result = _measure(rows, cols, memory, 7 if arguments.quick else 15)
                case = {"n": rows, "k": cols, "format": "nf4", "dtype": "bfloat16", "threads": threads}
                report.case(case | {"memory": memory}, result, "ours", limit="copy")
                for name, ratio in result.ratio.items():
                    ratios.setdefault(f"{memory}_{name}_{threads}_threads", []).append(ratio)
    report.summary({name: geometric_mean(r) for name, r in ratios.items()})
