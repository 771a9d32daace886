"""The gradients of LoRA factors, du^T x and dy^T u, against torch's products.

`torch` is the library's product in the dtype of the activations: oneDNN for bf16, on the matrix unit where
there is one; MKL for float32. `dA` is [rank, k], `dB` is [k, rank].
"""

from __future__ import annotations

import argparse
from itertools import product

import torch

from monograph.bench.report import Report
from monograph.bench.rounds import Work, geometric_mean, paired_rounds
from monograph.ops.gram import gram

RANKS, TOKENS, WIDTHS = (8, 16, 32, 64), (512, 2048), (1024, 4096)


def _works(left: torch.Tensor, right: torch.Tensor) -> dict[str, Work]:
    return {"ours": lambda: gram(left, right, dtype=left.dtype), "torch": lambda: left.t() @ right}


def run(arguments: argparse.Namespace, report: Report) -> None:
    groups: dict[str, list[float]] = {}
    ranks, tokens = ((16, 64), (512,)) if arguments.quick else (RANKS, TOKENS)
    for threads, dtype in product(arguments.threads, (torch.bfloat16, torch.float32)):
        torch.set_num_threads(threads)
        for rank, rows, width in product(ranks, tokens, WIDTHS):
            small, large = torch.randn(rows, rank).to(dtype), torch.randn(rows, width).to(dtype)
            for name, factors in (("dA", (small, large)), ("dB", (large, small))):
                result = paired_rounds(_works(*factors), "ours", 11, least_ms=2.0)
                case = {"case": name, "m": rows, "n": rank, "k": width, "threads": threads}
                report.case(case | {"dtype": str(dtype)[6:]}, result, "ours")
                group = f"torch_over_ours_{str(dtype)[6:]}_rank_{rank}_{threads}_threads"
                groups.setdefault(group, []).append(result.ratio["torch"])
    report.summary({name: geometric_mean(values) for name, values in groups.items()})
