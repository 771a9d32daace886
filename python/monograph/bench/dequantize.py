"""Packed to bf16: ours against a peer and the bare traffic.

For nf4 and fp4, block 64, the peer is bitsandbytes and `double` is ours double-quantised; for the MX formats
and NVFP4 it is torchao. `memory` is `fresh` (the output is a new mapping each time, mostly page faults) or
`warm` (recycled memory on every side, glibc's thresholds raised); `copy` is a loop that moves the same bytes
without arithmetic.
"""

from __future__ import annotations

import argparse

import torch

from monograph.bench.memory import recycle_large_blocks
from monograph.bench.report import Report
from monograph.bench.roofline import limit_move
from monograph.bench.rounds import Paired, Work, geometric_mean, paired_rounds
from monograph.bench.weights import AbsmaxWeights, ElementWeights, Weights
from monograph.ops.formats import ABSMAX_FORMATS

# Llama-3.1-8B's four shapes (the first also q and o of others), Llama-2-7B's MLP, and Qwen3-0.6B's.
SHAPES = [(4096, 4096), (14336, 4096), (1024, 4096), (4096, 14336), (4096, 11008)]
SHAPES += [(2048, 1024), (1024, 1024), (1024, 2048), (3072, 1024), (1024, 3072)]


def _measure(fmt: str, rows: int, cols: int, memory: str, rounds: int) -> Paired:
    absmax = fmt in ABSMAX_FORMATS
    weights: Weights
    weights = AbsmaxWeights(rows, cols, 1, False, fmt) if absmax else ElementWeights(rows, cols, 1, fmt)
    values, scales = weights.packed(0)
    out = torch.zeros(rows, cols, dtype=torch.bfloat16)
    ops = torch.ops.monograph

    def copy() -> object:
        to = out if memory == "warm" else torch.empty_like(out)
        limit_move(values, to)
        return to

    def allocating() -> object:
        return ops.dequantize(values, scales, weights.layout, torch.bfloat16)

    def into_out() -> object:
        return ops.dequantize_out(values, scales, weights.layout, out)

    works: dict[str, Work] = {"ours": allocating if memory == "fresh" else into_out, "copy": copy}
    if memory == "warm":
        works["allocating"] = allocating
    if absmax:
        double = AbsmaxWeights(rows, cols, 1, True, fmt).packed(0)
        dtype = torch.bfloat16
        works["double"] = lambda: ops.dequantize(*double, weights.layout, dtype)
        if memory == "warm":
            works["double"] = lambda: ops.dequantize_out(*double, weights.layout, out)
    if weights.peer == "bitsandbytes" or (weights.peer and memory == "fresh"):
        works[weights.peer] = lambda: weights.peer_dense(0)
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
                result = _measure(arguments.format, rows, cols, memory, 7 if arguments.quick else 15)
                case = {"n": rows, "k": cols, "format": arguments.format, "dtype": "bfloat16"}
                case |= {"threads": threads, "memory": memory}
                report.case(case, result, "ours", limit="copy")
                for name, ratio in result.ratio.items():
                    ratios.setdefault(f"{memory}_{name}_{threads}_threads", []).append(ratio)
    report.summary({name: geometric_mean(r) for name, r in ratios.items()})
