"""bf16 to NF4, block 64: ours against bitsandbytes' CPU path and against a copy of the same bytes."""

from __future__ import annotations

import argparse

import torch

import monograph as mg
from monograph.bench.report import Report
from monograph.bench.rounds import Work, geometric_mean, paired_rounds

SHAPES = [(4096, 4096), (14336, 4096)]


def run(arguments: argparse.Namespace, report: Report) -> None:
    import bitsandbytes  # noqa: F401  (registers its ops)

    ratios: dict[int, list[float]] = {}
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for rows, cols in SHAPES[:1] if arguments.quick else SHAPES:
            weight = (torch.randn(rows, cols) * 0.02).bfloat16()
            copy = torch.empty_like(weight)
            works: dict[str, Work] = {
                "ours": lambda w=weight: mg.quantize(w),  # type: ignore[misc]
                "ours_double": lambda w=weight: mg.quantize(w, double_quant=True),  # type: ignore[misc]
                "copy": lambda w=weight, c=copy: c.copy_(w),  # type: ignore[misc]
                "bitsandbytes": lambda w=weight: torch.ops.bitsandbytes.quantize_4bit(  # type: ignore[misc]
                    w, 64, "nf4", torch.uint8
                ),
            }
            result = paired_rounds(works, "ours", 3 if arguments.quick else 5)
            case = {"n": rows, "k": cols, "format": "nf4", "dtype": "bfloat16", "threads": threads}
            report.case(case, result, "ours", limit="copy")
            ratios.setdefault(threads, []).append(result.ratio["bitsandbytes"])
    report.summary({f"bitsandbytes_{t}_threads": geometric_mean(r) for t, r in ratios.items()})
