"""What the low-rank part costs: forward and backward of one layer, r = 16, base frozen, bf16.

`base` is the layer without an adapter, `fused` hands u, b and a to one op (no second pass over y or dx),
`separate` computes the adapter in plain torch next to the base and adds it, `dropout` masks the adapter's
input (its gradient is then a tensor of its own, masked and added). Ratios are to `fused`.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F

from monograph import quantize
from monograph.bench.report import Report
from monograph.bench.rounds import Work, geometric_mean, paired_rounds
from monograph.ops.linear import linear, plain_linear

SHAPES = [(4096, 4096), (14336, 4096), (1024, 1024)]
RANK = 16


def _works(rows: int, cols: int, tokens: int) -> dict[str, Work]:
    w = quantize((torch.randn(rows, cols) * 0.02).bfloat16(), double_quant=True)
    packed = (w.values, list(w.scales), w.layout)
    x = torch.randn(tokens, cols).bfloat16().requires_grad_()
    dy = torch.randn(tokens, rows).bfloat16()
    a = (torch.randn(RANK, cols) * 0.01).bfloat16().requires_grad_()
    b = (torch.randn(rows, RANK) * 0.01).bfloat16().requires_grad_()

    def step(y: torch.Tensor) -> object:
        return torch.autograd.grad(y, [x, a, b], dy, allow_unused=True)

    def dropped() -> torch.Tensor:
        return linear(x, *packed, None, plain_linear(F.dropout(x, 0.05), a), b)

    return {
        "fused": lambda: step(linear(x, *packed, None, plain_linear(x, a).detach(), b, a)),
        "base": lambda: step(linear(x, *packed)),
        "separate": lambda: step(linear(x, *packed) + F.linear(F.linear(x, a), b)),
        "dropout": lambda: step(dropped()),
    }


def run(arguments: argparse.Namespace, report: Report) -> None:
    groups: dict[str, list[float]] = {}
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for rows, cols in SHAPES[:1] if arguments.quick else SHAPES:
            for tokens in (128, 1024):
                works = _works(rows, cols, tokens)
                result = paired_rounds(works, "fused", 7, least_ms=5.0, watch_limit=True)
                case = {"m": tokens, "n": rows, "k": cols, "format": "nf4", "dtype": "bfloat16"}
                report.case(case | {"threads": threads, "rank": RANK}, result, "fused")
                for name, ratio in result.ratio.items():
                    groups.setdefault(f"{name}_over_fused_{threads}_threads", []).append(ratio)
    report.summary({name: geometric_mean(values) for name, values in groups.items()})
