"""monograph::dequantize and monograph::dequantize_out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch

from monograph.ops import library  # noqa: F401  (the schemas are registered there)
from monograph.ops.argument_checks import check_float, check_packed, check_shape, check_tensors, grids_of
from monograph.ops.dequantize_blocks import decode_blocks
from monograph.ops.dequantize_groups import decode_groups
from monograph.ops.dequantize_groups import e4m3_values as e4m3_values
from monograph.ops.formats import SCALE_GROUP, BlockShape, Format, format_numbered, value_table
from monograph.ops.layout import read_layout

# Elements that the portable implementation decodes at a time: 12 MiB of intermediates.
PANEL = 1 << 19


def dequantize(
    values: torch.Tensor,
    scales: Sequence[torch.Tensor],
    layout: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A packed weight as `dtype`; into `out`, whose dtype then counts, if given.

    `layout` is [format number, block size, *shape] or the longer form of `monograph.ops.layout`. Most people
    call `PackedWeight.dequantize` instead.
    """
    if out is None:
        return torch.ops.monograph.dequantize(values, scales, layout, dtype)
    if out.requires_grad and torch.is_grad_enabled():
        raise ValueError("dequantize: out requires a gradient, wanted a tensor without one or no_grad")
    torch.ops.monograph.dequantize_out(values, scales, layout, out)
    return out


def as_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of float32 values, wherever they are mapped, as float32. Copies: a view needs alignment."""
    return tensor.reshape(-1).clone().view(torch.float32)


def e8m0_values(codes: torch.Tensor) -> torch.Tensor:
    """2^(byte - 127) as float32, NaN for 255; byte 0 is a subnormal that no shift gives."""
    values = (codes.int() << 23).view(torch.float32)
    values = torch.where(codes == 0, 2.0**-127, values)
    return torch.where(codes == 255, torch.nan, values)


def _chosen(fmt: Format, codes: torch.Tensor) -> torch.Tensor:
    """The values of codes as float32 without a table in memory: what a compiler keeps in registers."""
    if fmt.bits == 8:
        return e4m3_values(codes)
    found = torch.full_like(codes, fmt.values[0], dtype=torch.float32)
    for code, value in enumerate(fmt.values[1:], 1):
        found = torch.where(codes == code, value, found)
    return found


def _looked_up(fmt: Format, codes: torch.Tensor) -> torch.Tensor:
    return value_table(fmt, codes.device).index_select(0, codes)


def _double_quantised(scales: Sequence[torch.Tensor]) -> torch.Tensor:
    codes, groups, table, offset = scales
    entries = as_float32(table).index_select(0, codes.reshape(-1).int())
    per_block = as_float32(groups).repeat_interleave(SCALE_GROUP)[: entries.numel()]
    return entries * per_block + as_float32(offset)


def portable_scales(
    fmt: Format, scales: Sequence[torch.Tensor], shape: Sequence[int], block: int
) -> torch.Tensor:
    """One float32 scale per block, flat."""
    if len(scales) == 4:
        return _double_quantised(scales)
    stored = scales[0].reshape(-1)
    blocks = prod(fmt.grid(shape, block))
    kind = fmt.scale_type(stored.numel(), blocks)
    if kind == "e8m0":
        return e8m0_values(stored)
    if kind == "bfloat16":
        return stored.clone().view(torch.bfloat16).float()
    if kind == "float32":
        return as_float32(stored)
    per_block = e4m3_values(stored)
    if len(scales) == 1:
        return per_block
    tensor = as_float32(scales[1])
    tensor = tensor.repeat_interleave(blocks // max(tensor.numel(), 1))
    return per_block / tensor if fmt.tensor_scale == "divides" else per_block * tensor


def per_element(fmt: Format, per_block: torch.Tensor, shape: Sequence[int], block: int) -> torch.Tensor:
    """The scale of each element, flat."""
    if fmt.shape is not BlockShape.SQUARE:
        return per_block.repeat_interleave(block)[: prod(shape)]
    down, across = fmt.grid(shape, block)[-2:]
    grid = per_block.reshape([prod(shape[:-2]), down, across])
    rows = shape[-2] if len(shape) > 1 else 1
    wide = grid.repeat_interleave(block, 1)[:, :rows].repeat_interleave(block, 2)[:, :, : shape[-1]]
    return wide.reshape(-1)


def codes_of(fmt: Format, values: torch.Tensor) -> torch.Tensor:
    """One int32 code per element from flat bytes."""
    if fmt.bits == 4:
        # Not a stack of both halves: a partitioner would keep that for the backward, a copy of the weight.
        place = torch.arange(2, dtype=torch.uint8, device=values.device)
        shift = 4 * place if fmt.low_nibble_first else 4 - 4 * place
        values = ((values[:, None] >> shift) & 15).reshape(-1)
    return values.int()


Values = Callable[[Format, torch.Tensor], torch.Tensor]


def _decode(
    fmt: Format,
    block: int,
    values: torch.Tensor,
    per_block: torch.Tensor,
    elements: int,
    dtype: torch.dtype,
    values_of: Values = _looked_up,
) -> torch.Tensor:
    """The first `elements` of flat bytes that begin with a block, flat; blocks follow each other."""
    decoded = values_of(fmt, codes_of(fmt, values))
    whole = elements // block
    dense = decoded[: whole * block].reshape(whole, block) * per_block[:whole, None]
    dense = dense.to(dtype).reshape(-1)
    if whole * block == elements:
        return dense
    tail = decoded[whole * block : elements] * per_block[whole : whole + 1]
    return torch.cat([dense, tail.to(dtype)])


def _decode_squares(
    fmt: Format,
    block: int,
    values: torch.Tensor,
    per_block: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    values_of: Values = _looked_up,
) -> torch.Tensor:
    decoded = values_of(fmt, codes_of(fmt, values))
    return (decoded * per_element(fmt, per_block, shape, block)).to(dtype)


def decode_in_panels(
    fmt: Format,
    block: int,
    values: torch.Tensor,
    per_block: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """All elements of one grid, flat; beside them no more than a panel's intermediates exist."""
    elements = prod(shape)
    out = torch.empty(elements, dtype=dtype, device=values.device)
    if elements == 0:
        return out
    if fmt.shape is BlockShape.SQUARE:
        down, across = fmt.grid(shape, block)[-2:]
        rows, cols = shape[-2] if len(shape) > 1 else 1, shape[-1]
        step = max(1, PANEL // max(block * cols, 1))  # rows of blocks at a time
        grids, bytes_ = per_block.reshape(-1, down, across), values.reshape(-1, rows, cols)
        dense = out.reshape(-1, rows, cols)
        for m in range(dense.shape[0]):
            for begin in range(0, down, step):
                part = slice(begin * block, min((begin + step) * block, rows))
                size = (part.stop - part.start, cols)
                own = grids[m, begin : begin + step].reshape(-1)
                found = _decode_squares(fmt, block, bytes_[m, part].reshape(-1), own, size, dtype)
                dense[m, part] = found.reshape(size)
        return out
    step = max(1, PANEL // block)
    for begin in range(0, -(-elements // block), step):
        first, last = begin * block, min((begin + step) * block, elements)
        packed = values[first * fmt.bits // 8 : fmt.packed_bytes(last)]
        own = per_block[begin : begin + step]
        out[first:last] = _decode(fmt, block, packed, own, last - first, dtype)
    return out


def portable_dequantize(
    values: torch.Tensor, scales: Sequence[torch.Tensor], layout: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """The operator in aten operations, for any device, PANEL elements at a time; a reference in the tests."""
    return _dequantize(values, scales, layout, dtype, decode_in_panels)


def fused_dequantize(
    values: torch.Tensor, scales: Sequence[torch.Tensor], layout: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """The same as one expression, for compilers that fuse it into one pass over one buffer."""

    def whole(
        fmt: Format,
        block: int,
        values: torch.Tensor,
        per_block: torch.Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        if fmt.shape is BlockShape.SQUARE:
            return _decode_squares(fmt, block, values, per_block, shape, dtype, _chosen)
        return _decode(fmt, block, values, per_block, prod(shape), dtype, _chosen)

    return _dequantize(values, scales, layout, dtype, whole)


def _dequantize(
    values: torch.Tensor,
    scales: Sequence[torch.Tensor],
    layout: Sequence[int],
    dtype: torch.dtype,
    decode_grid: Callable[..., torch.Tensor],
) -> torch.Tensor:
    check_tensors("dequantize", values=values, scales=scales)
    whole = read_layout("dequantize", layout)
    check_packed("dequantize", values, scales, whole)
    check_float("dequantize", "the output", torch.empty(0, dtype=dtype))
    grids = []
    for part, own, grid in grids_of("dequantize", values, scales, whole):
        fmt = format_numbered(grid.format)
        shape = grid.stored_shape(fmt)
        if fmt.shape in (BlockShape.GROUP, BlockShape.INTERLEAVED):
            panel = PANEL if decode_grid is decode_in_panels else prod(shape)
            decode = decode_groups if fmt.shape is BlockShape.GROUP else decode_blocks
            dense = decode(fmt, grid.block, part, own, shape, dtype, panel)
            grids.append(dense[grid.origin :])
            continue
        per_block = portable_scales(fmt, own, shape, grid.block)
        dense = decode_grid(fmt, grid.block, part.reshape(-1), per_block, shape, dtype)
        grids.append(dense[grid.origin :])
    return (grids[0] if len(grids) == 1 else torch.cat(grids)).reshape(whole.shape)


@torch.library.register_fake("monograph::dequantize")
def _(values, scales, layout, dtype):  # type: ignore[no-untyped-def]
    check_tensors("dequantize", values=values, scales=scales)
    return values.new_empty(read_layout("dequantize", layout).shape, dtype=dtype)


@torch.library.register_fake("monograph::dequantize_out")
def _(values, scales, layout, out):  # type: ignore[no-untyped-def]
    check_tensors("dequantize_out", values=values, scales=scales, out=out)


torch.library.impl("monograph::dequantize", "CompositeExplicitAutograd")(portable_dequantize)


@torch.library.impl("monograph::dequantize_out", "CompositeExplicitAutograd")
def portable_dequantize_out(
    values: torch.Tensor, scales: Sequence[torch.Tensor], layout: Sequence[int], out: torch.Tensor
) -> None:
    check_tensors("dequantize_out", values=values, scales=scales, out=out)
    check_shape("dequantize_out", "out", out, read_layout("dequantize_out", layout).shape)
    out.copy_(portable_dequantize(values, scales, layout, out.dtype))
