"""Quantising to groups of a row in aten operations: int4, int8 and FP8 by the rules of compressed-tensors.

core/monograph/formats/row_groups.h has the rules; every result is rounded to the type of the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from monograph.ops.formats import E4M3, RULES, Format, ZeroPoints
from monograph.ops.quantize_elements import encode


def _packed(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """[rows, n] -> bytes of each row, the first field in the lowest bits, filled up to words of 32 bits."""
    fields = torch.nn.functional.pad(fields, (0, -fields.shape[1] % (32 // bits))).to(torch.uint8)
    return fields if bits == 8 else fields[:, ::2] | fields[:, 1::2] << 4


def _stored_zeros(fmt: Format, zero: torch.Tensor) -> torch.Tensor:
    """The bytes of signed zero points [rows, groups]."""
    if fmt.zero_points is ZeroPoints.BYTES:
        return zero.to(torch.int8).reshape(-1).view(torch.uint8)
    return stored_zero_points(fmt, (zero + (1 << (fmt.bits - 1))).to(torch.int32))


def stored_zero_points(fmt: Format, fields: torch.Tensor) -> torch.Tensor:
    """The words of zero points [rows, groups] that are packed along the rows, in the codes' own numbers."""
    rows, groups = fields.shape
    words = _packed(fields.t(), fmt.bits).reshape(groups, -(-rows * fmt.bits // 32), 4)
    return words.transpose(0, 1).reshape(-1)


def _scale_and_zero(
    fmt: Format,
    range_: tuple[float, float],
    least: torch.Tensor,
    most: torch.Tensor,
    minmax: bool,
    to_type: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale as it is stored, float32 zero point) of each group."""
    lowest, highest = range_
    steps = highest - lowest
    if minmax:
        width = to_type(most - least)
        scale = torch.where(width.isfinite(), width / steps, most / steps - least / steps)
    else:
        scale = torch.maximum(-least, most) / (steps / 2)
    stored = to_type(scale).to(getattr(torch, fmt.scale_types[0]))
    zero = torch.zeros_like(least)
    if minmax:
        exact = to_type(lowest - to_type(least / stored.float()))
        zero = torch.where(exact.isnan(), 0.0, exact.clamp(lowest, highest).round())
    return torch.where(stored == 0, torch.finfo(stored.dtype).eps, stored), zero


def quantize_groups(
    fmt: Format, input: torch.Tensor, finite: torch.Tensor, block: int, rule: int
) -> list[torch.Tensor]:
    """[values, scales] or [values, scales, zero points], all uint8 and flat."""
    cols = input.shape[-1]
    rows = prod(input.shape[:-1])
    x = input.float().reshape(rows, cols // block, block)
    kept = torch.where(finite.reshape(x.shape), x, 0.0)

    def to_type(number: torch.Tensor) -> torch.Tensor:
        return number.to(input.dtype).float()

    integers = fmt.zero_points is not ZeroPoints.NONE
    half = 1 << (fmt.bits - 1)
    lowest, highest = (-half, half - 1) if integers else (-448, 448)
    least, most = (f(dim=2).clamp(**limit) for f, limit in ((kept.amin, {"max": 0}), (kept.amax, {"min": 0})))
    minmax = rule == RULES["minmax"]
    stored, zero = _scale_and_zero(fmt, (lowest, highest), least, most, minmax, to_type)
    x = torch.where(x.isnan(), 0.0, x)
    number = to_type(to_type(x / stored.float()[..., None]) + zero[..., None]).clamp(lowest, highest)
    number = number.reshape(rows, cols)
    if not integers:
        values = encode(E4M3, number.contiguous())
    elif fmt.zero_points is ZeroPoints.BYTES:
        values = number.round().to(torch.int8).view(torch.uint8)
    else:
        values = _packed((number.round() + half).to(torch.int32), fmt.bits)
    parts = [values.reshape(-1), stored.contiguous().view(torch.uint8).reshape(-1)]
    return [*parts, _stored_zeros(fmt, zero)] if minmax else parts
