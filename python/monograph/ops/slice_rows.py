"""Rows of a packed weight: views of the same bytes and another layout. Plain indexing, no operator.

`slice_rows` in core/monograph/formats/slice.h is the same for kernels, which move an origin alone; here the
bytes before and behind the rows are left out too, up to whole blocks and groups of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch

from monograph.ops.argument_checks import grids_of
from monograph.ops.formats import SCALE_GROUP, BlockShape, ZeroPoints, format_numbered
from monograph.ops.layout import Layout

Part = tuple[torch.Tensor, Sequence[torch.Tensor], Layout]


def _one_grid(weight: Part, first: int, count: int) -> tuple[Part, int]:
    """The matrix that the rows lie in, where each has a grid of its own, and the first row within it."""
    values, scales, layout = weight
    *lead, _ = layout.shape
    # Blocks that know rows start anew with each matrix, however it was quantised.
    flat = format_numbered(layout.format).shape is BlockShape.FLAT
    each = layout.grid_rows or (lead[-1] if len(lead) > 1 and not flat else prod(lead))
    matrix = first // each if each and count else 0
    if count and (first + count - 1) // each != matrix:
        raise ValueError(
            f"slice_rows: rows {first} to {first + count} lie in more than one matrix of {each} rows"
        )
    if each == prod(lead):
        return weight, first
    parts = grids_of("slice_rows", values, scales, replace(layout, grid_rows=each))
    return parts[matrix], first - matrix * each


def _slice_groups(
    values: torch.Tensor, scales: Sequence[torch.Tensor], layout: Layout, first: int, count: int
) -> Part:
    """Zero points that are packed along the rows are cut at whole words alone."""
    fmt, cols = format_numbered(layout.format), layout.shape[-1]
    first += layout.origin // max(cols, 1)
    unit = 32 // fmt.bits if len(scales) == 2 and fmt.zero_points is ZeroPoints.PACKED else 1
    base, stop = first // unit * unit, first + count
    groups, size = cols // layout.block, fmt.row_bytes(cols)
    each = groups * fmt.scale_bytes(None)
    cut = [scales[0].reshape(-1)]
    if cut[0].numel() != fmt.scale_bytes(None) or prod(layout.stored_shape(fmt)) == layout.block:
        cut[0] = cut[0][base * each : stop * each]
    if len(scales) == 2:
        begin, end = fmt.zero_point_bytes(base, groups), fmt.zero_point_bytes(stop, groups)
        cut.append(scales[1].reshape(-1)[begin:end])
    part = replace(layout, shape=(count, cols), origin=(first - base) * cols, grid_rows=0)
    return values.reshape(-1)[base * size : stop * size], cut, part


def _slice_interleaved(
    values: torch.Tensor, scales: Sequence[torch.Tensor], layout: Layout, first: int, count: int
) -> Part:
    """With a row map the rows lie anywhere: the map is cut, the values stay whole."""
    cols = layout.shape[-1]
    size = format_numbered(layout.format).row_bytes(cols)
    first += layout.origin // max(cols, 1)
    part = replace(layout, shape=(count, cols), origin=0, grid_rows=0)
    if scales:
        return values, [scales[0].reshape(-1)[4 * first : 4 * (first + count)]], part
    return values.reshape(-1)[size * first : size * (first + count)], [], part


def slice_rows(
    values: torch.Tensor, scales: Sequence[torch.Tensor], layout: Layout, first: int, count: int
) -> Part:
    """Rows [first, first + count) as a matrix; `first` counts through the rows of all matrices."""
    rows = prod(layout.shape[:-1])
    if first < 0 or count < 0 or first + count > rows:
        raise ValueError(f"slice_rows: rows {first} to {first + count} are wanted, the weight has {rows}")
    (values, scales, layout), first = _one_grid((values, scales, layout), first, count)
    fmt, block, cols = format_numbered(layout.format), layout.block, layout.shape[-1]
    if fmt.shape is BlockShape.GROUP:
        return _slice_groups(values, scales, layout, first, count)
    if fmt.shape is BlockShape.INTERLEAVED:
        return _slice_interleaved(values, scales, layout, first, count)
    start = layout.origin + first * cols  # of the stored elements
    stop = start + count * cols
    blocks = prod(fmt.grid(layout.stored_shape(fmt), block))
    size = scales[0].numel() // max(blocks, 1)  # bytes of one scale
    more = list(scales[1:])
    if fmt.shape is BlockShape.SQUARE:
        across, unit = -(-cols // block), max(block * cols, 1)
        base = start // unit * unit
        begin, end = base // unit * across, -(-stop // unit) * across
    else:
        unit = max(cols, 1) if fmt.shape is BlockShape.ROW else block * (SCALE_GROUP if len(more) == 3 else 1)
        base = start // unit * unit
        begin, end = base // block, -(-stop // block)
        if len(more) == 3:
            more[0] = more[0].reshape(-1)[4 * (base // unit) : 4 * -(-end // SCALE_GROUP)]
    part = replace(layout, shape=(count, cols), origin=start - base, grid_rows=0)
    packed = values.reshape(-1)[base * fmt.bits // 8 : -(-stop * fmt.bits // 8)]
    return packed, [scales[0].reshape(-1)[size * begin : size * end], *more], part
