"""monograph::dequantize and monograph::dequantize_out."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from monograph import _library  # noqa: F401  (the schemas are registered there)
from monograph.formats import SCALE_GROUP, BlockShape, Format, format_numbered, value_table
from monograph.ops.argument_checks import check_float, check_packed, check_shape, check_tensors, grids_of
from monograph.ops.layout import Layout, read_layout


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


def _double_quantised(scales: Sequence[torch.Tensor]) -> torch.Tensor:
    codes, groups, table, offset = scales
    entries = as_float32(table)[codes.reshape(-1).long()]
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
    per_block = value_table(format_numbered(4), stored.device)[stored.long()]
    if len(scales) == 1:
        return per_block
    tensor = as_float32(scales[1])
    tensor = tensor.repeat_interleave(blocks // max(tensor.numel(), 1))
    return per_block / tensor if fmt.tensor_scale == "divides" else per_block * tensor


def per_element(fmt: Format, per_block: torch.Tensor, shape: Sequence[int], block: int) -> torch.Tensor:
    """The scale of each element, flat."""
    elements = prod(shape)
    if fmt.shape is not BlockShape.SQUARE:
        return per_block.repeat_interleave(block)[:elements]
    down, across = fmt.grid(shape, block)[-2:]
    grid = per_block.reshape([prod(shape[:-2]), down, across])
    rows = shape[-2] if len(shape) > 1 else 1
    wide = grid.repeat_interleave(block, 1)[:, :rows].repeat_interleave(block, 2)[:, :, : shape[-1]]
    return wide.reshape(-1)


def portable_dequantize(
    values: torch.Tensor, scales: Sequence[torch.Tensor], layout: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """The operator in aten operations, for any device. Also a second reference in the tests."""
    check_tensors("dequantize", values=values, scales=scales)
    whole = read_layout("dequantize", layout)
    check_packed("dequantize", values, scales, whole)
    check_float("dequantize", "the output", torch.empty(0, dtype=dtype))
    grids = [_portable_grid(*part, dtype) for part in grids_of("dequantize", values, scales, whole)]
    return (grids[0] if len(grids) == 1 else torch.cat(grids)).reshape(whole.shape)


def _portable_grid(
    values: torch.Tensor, scales: Sequence[torch.Tensor], layout: Layout, dtype: torch.dtype
) -> torch.Tensor:
    fmt, block = format_numbered(layout.format), layout.block
    shape = layout.stored_shape(fmt)
    codes = values.reshape(-1)
    if fmt.bits == 4:
        pair = (codes & 15, codes >> 4) if fmt.low_nibble_first else (codes >> 4, codes & 15)
        codes = torch.stack(pair, dim=-1).reshape(-1)[: prod(shape)]
    decoded = value_table(fmt, values.device)[codes.long()]
    scale = per_element(fmt, portable_scales(fmt, scales, shape, block), shape, block)
    return (decoded * scale).to(dtype)[layout.origin :]


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
