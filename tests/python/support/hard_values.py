"""Values that rounding rules differ on, and the comparison of packed bytes."""

from __future__ import annotations

from typing import Any

import torch


def hard_values(rows: int, cols: int, seed: int = 0, spread: int = 12) -> torch.Tensor:
    """Normal values, every fifth a tie of E2M1 or E4M3 in its block, block magnitudes over 2^(2 * spread)."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, cols, generator=generator)
    ties = torch.randint(-56, 57, (rows, cols), generator=generator) / 8
    choice = torch.rand(rows, cols, generator=generator)
    weight = torch.where(choice < 0.2, ties, weight)
    weight = torch.where(choice > 0.99, -0.0, weight)
    exponents = torch.randint(-spread, spread + 1, (rows, -(-cols // 32), 1), generator=generator)
    weight = weight * torch.exp2(exponents).expand(-1, -1, 32).reshape(rows, -1)[:, :cols]
    weight[1::2] *= 1 + torch.rand(weight[1::2].shape[0], 1, generator=generator)  # no more ties, any maximum
    weight[::97] = 0.0
    return weight


def assert_same(w: Any, values: torch.Tensor, *scales: torch.Tensor) -> None:
    for got, want in zip((w.values, *w.scales), (values, *scales), strict=True):
        got, want = got.reshape(-1), want.contiguous().view(torch.uint8).reshape(-1)
        wrong = got != want
        assert not bool(wrong.any()), f"{int(wrong.sum())} of {want.numel()} bytes differ"
