"""A layer of experts at the width of a real model: its sizes, random weights and random routes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from monograph.ops.experts import Activation


@dataclass(frozen=True)
class Width:
    """Sizes of one layer: hidden, intermediate, experts, experts of a token."""

    hidden: int
    inner: int
    experts: int
    top: int
    activation: Activation
    interleaved: bool = False
    bias: bool = False


WIDTHS = {
    "gpt-oss": Width(2880, 2880, 32, 4, Activation.GPT_OSS, interleaved=True, bias=True),
    "qwen3": Width(2048, 768, 128, 8, Activation.SILU),
}


def random_stack(count: int, rows: int, cols: int, seed: int) -> torch.Tensor:
    """[count, rows, cols] in bf16: one random matrix, rolled: gigabytes of them take minutes."""
    generator = torch.Generator().manual_seed(seed)
    first = (torch.randn(rows, cols, generator=generator) * 0.02).bfloat16()
    return torch.stack([first.roll(37 * i + 1, 0) for i in range(count)])


def batch(width: Width, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, dy, ids, weights: each token's experts are drawn uniformly."""
    generator = torch.Generator().manual_seed(tokens)
    x, dy = (torch.randn(tokens, width.hidden, generator=generator).bfloat16() for _ in range(2))
    weights, ids = torch.randn(tokens, width.experts, generator=generator).topk(width.top, -1)
    return x, dy, ids, weights.softmax(-1)


def factors(width: Width, rank: int) -> list[torch.Tensor]:
    """a1, b1, a2, b2 as PEFT's `target_parameters` has them, fp32."""
    all_ranks = rank * width.experts
    shapes = [(all_ranks, width.hidden), (2 * width.inner, all_ranks)]
    shapes += [(all_ranks, width.inner), (width.hidden, all_ranks)]
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(shape, generator=generator) * 0.02).requires_grad_() for shape in shapes]
