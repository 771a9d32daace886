"""Adapters on ranges of rows of one packed weight, forward and backward, against one call for each of them.

`ours` is `linear_many` with all that an adapter without dropout needs: u, y, du, dx, dA and dB; `singles` is
today's path of one adapter, once for each. Times are those of the processor. One adapter has the same rows as
it has alone, so that its line says what the ranges cost.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import product

import torch

from monograph.bench.report import Report
from monograph.bench.rounds import Work, geometric_mean, paired_rounds
from monograph.ops.linear import linear, plain_linear
from monograph.ops.linear_many import linear_many
from monograph.ops.low_rank_many import low_rank_many
from monograph.quant.packed_weight import PackedWeight, quantize

RANK = 16
COUNTS, TOKENS, WIDTHS = (1, 4, 8), (16, 64, 256, 1024), (1024, 4096)


def works(packed: PackedWeight, count: int, tokens: int) -> dict[str, Work]:
    """Both ways, on the same numbers."""
    rows, cols = packed.shape
    x = torch.randn(count * tokens, cols).bfloat16().requires_grad_()
    dy = torch.randn(count * tokens, rows).bfloat16()
    a = [torch.randn(RANK, cols).bfloat16().requires_grad_() for _ in range(count)]
    b = [torch.randn(rows, RANK).bfloat16().requires_grad_() for _ in range(count)]
    weight = packed.values, list(packed.scales), packed.layout
    starts = torch.arange(count + 1) * tokens

    def ours() -> Sequence[torch.Tensor]:
        with torch.no_grad():
            u = low_rank_many(x, a, starts, RANK)
        y = linear_many(x, *weight, starts, u, b, a)
        return torch.autograd.grad(y, [x, *a, *b], dy)

    alone = [part.detach().clone().requires_grad_() for part in x.split(tokens)]

    def singles() -> None:
        for own, gradient, first, second in zip(alone, dy.split(tokens), a, b, strict=True):
            with torch.no_grad():
                u = plain_linear(own, first)
            y = linear(own, *weight, None, u, second, first)
            torch.autograd.grad(y, [own, first, second], gradient)

    return {"ours": ours, "singles": singles}


def run(arguments: argparse.Namespace, report: Report) -> None:
    groups: dict[str, list[float]] = {}
    counts, widths = ((1, 4), (1024,)) if arguments.quick else (COUNTS, WIDTHS)
    lengths = (16, 64) if arguments.quick else TOKENS
    for threads, width in product(arguments.threads, widths):
        torch.set_num_threads(threads)
        packed = quantize(torch.randn(width, width), "nf4", double_quant=True)
        for count, tokens in product(counts, lengths):
            result = paired_rounds(
                works(packed, count, tokens), "ours", 9, least_ms=2.0, clock=time.process_time
            )
            case = {"adapters": count, "tokens": tokens, "width": width, "rank": RANK, "threads": threads}
            report.case(case, result, "ours")
            groups.setdefault(f"singles_over_ours_{count}_adapters_{tokens}_tokens", []).append(
                result.ratio["singles"]
            )
    report.summary({name: geometric_mean(values) for name, values in groups.items()})
