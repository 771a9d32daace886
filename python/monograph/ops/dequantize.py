"""monograph::dequantize and monograph::dequantize_out."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from monograph import _library  # noqa: F401  (the schemas are registered there)
from monograph.formats import SCALE_GROUP, format_numbered, value_table


def dequantize(
    values: torch.Tensor,
    scales: Sequence[torch.Tensor],
    layout: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A packed weight as `dtype`; into `out`, whose dtype then counts, if given.

    `layout` is [format number, block size, *shape]. Most people call `PackedWeight.dequantize` instead.
    """
    if out is None:
        return torch.ops.monograph.dequantize(values, scales, layout, dtype)
    torch.ops.monograph.dequantize_out(values, scales, layout, out)
    return out


def as_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of float32 values, wherever they are mapped, as float32. Copies: a view needs alignment."""
    return tensor.reshape(-1).clone().view(torch.float32)


def portable_scales(scales: Sequence[torch.Tensor]) -> torch.Tensor:
    """One float32 scale a block, double-quantised or not."""
    if len(scales) == 1:
        return as_float32(scales[0])
    codes, groups, table, offset = scales
    entries = as_float32(table)[codes.reshape(-1).long()]
    per_block = as_float32(groups).repeat_interleave(SCALE_GROUP)[: entries.numel()]
    return entries * per_block + as_float32(offset)


def portable_dequantize(
    values: torch.Tensor, scales: Sequence[torch.Tensor], layout: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """The operator in aten operations, for any device. Also a second reference in the tests."""
    number, block, *shape = layout
    fmt = format_numbered(number)
    fmt.check_block(block)
    elements = prod(shape)
    packed = values.reshape(-1)
    codes = torch.stack((packed >> 4, packed & 15), dim=-1).reshape(-1)[:elements]
    decoded = value_table(fmt, values.device)[codes.long()]
    per_element = portable_scales(scales).repeat_interleave(block)[:elements]
    return (decoded * per_element).to(dtype).reshape(shape)


@torch.library.register_fake("monograph::dequantize")
def _(values, scales, layout, dtype):  # type: ignore[no-untyped-def]
    return values.new_empty(layout[2:], dtype=dtype)


@torch.library.register_fake("monograph::dequantize_out")
def _(values, scales, layout, out):  # type: ignore[no-untyped-def]
    return None


torch.library.impl("monograph::dequantize", "CompositeExplicitAutograd")(portable_dequantize)


@torch.library.impl("monograph::dequantize_out", "CompositeExplicitAutograd")
def _portable_dequantize_out(
    values: torch.Tensor, scales: Sequence[torch.Tensor], layout: Sequence[int], out: torch.Tensor
) -> None:
    out.copy_(portable_dequantize(values, scales, layout, out.dtype))
