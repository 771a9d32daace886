"""Formats with groups of a row in aten operations: int4, int8 and FP8, (code - zero) * scale.

core/monograph/formats/row_groups.h is the same for kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from monograph.ops.formats import Format, ZeroPoints


def e4m3_values(codes: torch.Tensor) -> torch.Tensor:
    """The values of E4M3 bytes as float32, in integer arithmetic: no table, no subnormal number."""
    magnitude = codes.int() & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).view(torch.float32)
    value = torch.where(magnitude < 8, magnitude * 2.0**-9, normal)
    value = torch.where(magnitude == 0x7F, torch.nan, value)
    return torch.where(codes >= 128, -value, value)


def _scales(fmt: Format, stored: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    """float32 [rows, groups]. Copies: a view of mapped bytes needs alignment."""
    numbers = stored.reshape(-1).clone().view(getattr(torch, fmt.scale_types[0])).float()
    return numbers.expand(rows * groups).reshape(rows, groups)


def zero_points(fmt: Format, stored: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    """int32 [rows, groups], in the codes' own numbers."""
    if fmt.zero_points is ZeroPoints.BYTES:
        return stored.reshape(rows, groups).view(torch.int8).int()
    words = stored.reshape(-1, groups, 4)  # bytes, the first row in the lowest bits
    if fmt.bits == 4:
        place = torch.arange(0, 8, 4, dtype=torch.uint8, device=stored.device)
        words = ((words[..., None] >> place) & 15).reshape(-1, groups, 8)
    return words.transpose(1, 2).reshape(-1, groups)[:rows].int()


def _codes(fmt: Format, values: torch.Tensor, cols: int) -> torch.Tensor:
    """float32 [rows, cols] from bytes [rows, row_bytes]; integers as they are stored."""
    if fmt.zero_points is ZeroPoints.NONE:
        return e4m3_values(values[:, :cols])
    if fmt.bits == 4:
        place = torch.arange(0, 8, 4, dtype=torch.uint8, device=values.device)
        values = ((values[..., None] >> place) & 15).reshape(values.shape[0], -1)
    elif fmt.zero_points is ZeroPoints.BYTES:
        values = values.view(torch.int8)
    return values[:, :cols].float()


def decode_groups(
    fmt: Format,
    block: int,
    values: torch.Tensor,
    scales: Sequence[torch.Tensor],
    shape: Sequence[int],
    dtype: torch.dtype,
    panel: int,
) -> torch.Tensor:
    """All elements, flat, about `panel` of them at a time."""
    rows, cols = prod(shape[:-1]), shape[-1]
    groups = cols // block
    if rows * cols == 0:
        return torch.empty(0, dtype=dtype, device=values.device)
    scale = _scales(fmt, scales[0], rows, groups)
    middle = 0 if fmt.zero_points is not ZeroPoints.PACKED else 1 << (fmt.bits - 1)
    zero = zero_points(fmt, scales[1], rows, groups).float() if len(scales) == 2 else None
    packed = values.reshape(rows, fmt.row_bytes(cols))

    def decode(first: int, last: int) -> torch.Tensor:
        codes = _codes(fmt, packed[first:last], cols).reshape(last - first, groups, block)
        if fmt.zero_points is not ZeroPoints.NONE:  # before the product: the difference is exact
            codes = codes - (middle if zero is None else zero[first:last, :, None])
        return (codes * scale[first:last, :, None]).to(dtype).reshape(-1)

    if rows * cols <= panel:
        return decode(0, rows)
    out = torch.empty(rows * cols, dtype=dtype, device=values.device)
    step = max(1, panel // max(cols, 1))
    for first in range(0, rows, step):
        last = min(first + step, rows)
        out[first * cols : last * cols] = decode(first, last)
    return out
