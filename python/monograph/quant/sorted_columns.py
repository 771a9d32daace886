"""Columns of a packed weight that are stored in another order, sorted by group (GPTQ's act-order).

`columns`, int32 [cols], says which column of the weight each stored one is, so that

    y  = x[..., columns] W'^T               W' as it is stored
    dx = (dy W') scattered to `columns`

A permutation moves numbers and adds none: both have the bits of the product with W'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def inverse_of(columns: torch.Tensor) -> torch.Tensor:
    """Where each column of the weight is stored."""
    places = torch.arange(columns.numel(), dtype=columns.dtype, device=columns.device)
    return torch.empty_like(columns).scatter_(0, columns.long(), places)


class _Permuted(torch.autograd.Function):
    """A gather forward and backward: torch's own gradient of index_select adds into zeros, which turns -0.0
    into 0.0, and no device promises the order of such sums."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(columns)
        return x.index_select(-1, columns)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (columns,) = ctx.saved_tensors
        return _Permuted.apply(gradient, inverse_of(columns)), None


def permuted(x: torch.Tensor, columns: torch.Tensor | None) -> torch.Tensor:
    """x[..., columns], differentiable any number of times; x itself without columns."""
    return x if columns is None else _Permuted.apply(x, columns)


def checked_columns(columns: torch.Tensor, cols: int) -> torch.Tensor | None:
    """The columns of a file, or None if they lie in order; an error unless each is there once."""
    if columns.dtype != torch.int32 or list(columns.shape) != [cols]:
        found = f"weight_columns is {columns.dtype} {list(columns.shape)}"
        raise ValueError(f"{found}, wanted int32 [{cols}]")
    every = torch.arange(cols, dtype=torch.int32, device=columns.device)
    if torch.equal(columns, every):
        return None
    if not torch.equal(columns.sort().values, every):
        raise ValueError(f"weight_columns has no permutation, wanted each of 0 to {cols - 1} once")
    return columns


def refuse_columns(tensors: Mapping[str, torch.Tensor], method: str) -> None:
    """A folder of another method: its own library would ignore the tensor and compute something else."""
    if "weight_columns" in tensors:
        raise ValueError(f"there is a weight_columns, and quant_method is {method!r}, wanted 'monograph'")
