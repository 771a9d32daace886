"""Ranges of rows that belong to one adapter each: `starts`, as the operators of many adapters take it.

Rows [starts[i], starts[i + 1]) are those of adapter i, counted over all leading dimensions. `starts` is int64
[adapters + 1] on the host: data, so that other ranges are no other graph. Ranges may be empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod

import torch

from monograph.ops.argument_checks import check_float, check_shape, check_tensors, dtype_name, require

Tensors = Sequence[torch.Tensor]


def check_starts(op: str, starts: torch.Tensor, count: int, beside: torch.Tensor) -> None:
    """All but the numbers, which a fake cannot read; on the host, or where the activations are meta too."""
    check_tensors(op, starts=starts)
    kind = f"{dtype_name(starts.dtype)} {list(starts.shape)}"
    require(starts.dtype == torch.int64 and starts.dim() == 1, op, f"starts is {kind}, wanted int64 [n + 1]")
    there = starts.device.type == "cpu" or starts.device == beside.device
    require(there, op, f"starts is on {starts.device}, wanted cpu")
    found = f"starts has {starts.shape[0]} entries"
    require(starts.shape[0] == count + 1, op, f"{found}, wanted {count + 1} for {count} adapters")


def read_starts(op: str, starts: torch.Tensor, count: int, x: torch.Tensor) -> list[int]:
    """The numbers, of which each is at least the one before and the last is the number of x's rows."""
    check_starts(op, starts, count, x)
    rows = rows_in(x)
    require(starts.device.type == "cpu", op, f"starts is on {starts.device}, wanted cpu")
    found: list[int] = starts.tolist()
    ascending = all(a <= b for a, b in pairwise(found))
    fits = found[0] == 0 and found[-1] == rows and ascending
    require(fits, op, f"starts is {found}, wanted ascending numbers from 0 to {rows}, the rows")
    return found


def ranges(starts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """The adapters that have rows."""
    for i, (begin, end) in enumerate(pairwise(starts)):
        if end > begin:
            yield i, slice(begin, end)


def rows_in(tensor: torch.Tensor) -> int:
    return prod(tensor.shape[:-1])


def check_factors(
    op: str, what: str, factors: Tensors, sizes: Sequence[tuple[int | None, int | None]]
) -> None:
    """Matrices; a size of None is any. Those that have elements are of one dtype."""
    first = None
    for i, (factor, (rows, cols)) in enumerate(zip(factors, sizes, strict=True)):
        name = f"{what}[{i}]"
        check_float(op, name, factor)
        require(factor.dim() == 2, op, f"{name} has {factor.dim()} dimensions, wanted two")
        found = tuple(factor.shape)
        wanted = (found[0] if rows is None else rows, found[1] if cols is None else cols)
        check_shape(op, name, factor, wanted)
        if found[0] and found[1]:
            first = factor if first is None else first
            same = f"{name} is {dtype_name(factor.dtype)}, wanted {dtype_name(first.dtype)} as the others"
            require(factor.dtype == first.dtype, op, same)


def check_count(op: str, what: str, tensors: Tensors, count: int, *, may_be_empty: bool) -> None:
    fits = len(tensors) == count or (may_be_empty and not tensors)
    wanted = f"wanted {'0 or ' if may_be_empty else ''}{count}, one for each adapter"
    require(fits, op, f"{what} has {len(tensors)} entries, {wanted}")
