"""Experts of a packed stack: views of the same bytes and another layout. Plain indexing, no operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from monograph.ops.argument_checks import shared_scales
from monograph.ops.formats import BlockShape, format_numbered
from monograph.ops.layout import PLAIN, Layout
from monograph.ops.slice_rows import Part, slice_rows

_MAP = 2  # of double-quantised scales: one for all


def slice_experts(
    values: torch.Tensor, scales: Sequence[torch.Tensor], layout: Layout, first: int, count: int
) -> Part:
    """Experts [first, first + count) of a stack [E, rows, cols], as a stack.

    Where blocks run on from expert to expert the values and scales of the part may begin before it: the
    layout's origin says how many elements.
    """
    if len(layout.shape) != 3:
        raise ValueError(f"slice_experts: the weight has {len(layout.shape)} dimensions, wanted 3")
    experts, rows, cols = layout.shape
    if first < 0 or count < 1 or first + count > experts:
        raise ValueError(
            f"slice_experts: experts {first} to {first + count} are wanted, the stack has {experts}"
        )
    shape = (count, rows, cols)
    if layout.format == PLAIN:
        return values.reshape(layout.shape)[first : first + count], [], replace(layout, shape=shape)
    fmt = format_numbered(layout.format)
    if fmt.shape is BlockShape.FLAT and layout.grid_rows == 0:
        values, scales, part = slice_rows(values, scales, layout, first * rows, count * rows)
        return values, scales, replace(part, shape=shape)
    if fmt.shape is BlockShape.INTERLEAVED and scales:
        raise ValueError(f"slice_experts: the {fmt.name} stack has a row map, wanted rows in order")
    # Each expert has its own bytes, grid by grid; a map, and a number that serves all, stay whole.
    grids = experts * rows // layout.grid_rows if layout.grid_rows else experts
    shared = shared_scales(layout, scales)

    def own(number: int, tensor: torch.Tensor) -> torch.Tensor:
        if number == _MAP or (tensor.numel() == shared.get(number) and grids > 1):
            return tensor
        if tensor.numel() % experts:
            raise ValueError(
                f"slice_experts: scales[{number}] of {fmt.name} has {tensor.numel()} bytes, wanted as many "
                f"for each of the {experts} experts"
            )
        return tensor.reshape(experts, -1)[first : first + count].reshape(-1, *tensor.shape[1:])

    values = own(-1, values) if values.dim() != 3 else values[first : first + count]
    return values, [own(i, s) for i, s in enumerate(scales)], replace(layout, shape=shape)
