"""Weights in the formats with groups of a row, packed and decoded in numpy, apart from the package."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch

from monograph.ops.formats import GROUP_FORMATS, Format, ZeroPoints
from monograph.quant.packed_weight import PackedWeight

# (rows, cols, group): whole rows of a length that is no power of two, groups that are none, padded rows.
SHAPES = ((133, 500, 500), (133, 500, 20), (40, 512, 128), (19, 256, 32))
CASES = [
    (name, symmetric)
    for name, fmt in GROUP_FORMATS.items()
    for symmetric in ((True,) if fmt.zero_points is ZeroPoints.NONE else (True, False))
]


def _e4m3(codes: np.ndarray) -> np.ndarray:
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    value[(codes & 127) == 127] = np.nan
    return np.where(codes < 128, value, -value)


def _packed(fields: np.ndarray, bits: int, words: bool) -> np.ndarray:
    """[rows, n] -> bytes of each row, the first field in the lowest bits, filled up to words of 32 bits."""
    per = 8 // bits
    unit = 32 // bits if words else per
    fields = np.pad(fields, ((0, 0), (0, -fields.shape[1] % unit))).astype(np.uint8)
    out = np.zeros((fields.shape[0], fields.shape[1] // per), np.uint8)
    for i in range(per):
        out |= fields[:, i::per] << np.uint8(bits * i)
    return out


@dataclass(frozen=True)
class GroupWeight:
    packed: PackedWeight
    exact: np.ndarray  # float64 [rows, cols]: (code - zero) * scale

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Rounded to float32 and then to `dtype`."""
        return torch.from_numpy(self.exact.astype(np.float32)).to(dtype)


def group_weight(
    name: str, shape: tuple[int, int, int], symmetric: bool, seed: int = 0, one: bool = False
) -> GroupWeight:
    fmt: Format = GROUP_FORMATS[name]
    rows, cols, group = shape
    groups = cols // group
    draw = np.random.default_rng(seed)
    codes = draw.integers(0, 1 << fmt.bits, (rows, cols))
    if fmt.zero_points is ZeroPoints.NONE:
        codes[(codes & 127) == 127] = 0x3C
    scale_type = getattr(torch, fmt.scale_types[0])
    scales = torch.from_numpy(draw.random(1 if one else (rows, groups)) * 0.01 + 0.001).to(scale_type)
    numbers = np.broadcast_to(scales.double().numpy(), (rows, groups))
    per_element = np.repeat(numbers, group, 1)
    parts = [scales.reshape(-1).view(torch.uint8)]
    if fmt.zero_points is ZeroPoints.NONE:
        exact, stored = _e4m3(codes) * per_element, codes.astype(np.uint8)
    else:
        signed = fmt.zero_points is ZeroPoints.BYTES
        low = -128 if signed else 0
        zeros = np.full((rows, groups), 0 if signed else 1 << (fmt.bits - 1))
        if not symmetric:
            zeros = draw.integers(low, low + (1 << fmt.bits), (rows, groups))
            bytes_ = zeros.astype(np.int8).view(np.uint8)
            if not signed:  # [groups, words of rows] -> [words of rows, groups, 4]
                words = _packed(zeros.T, fmt.bits, words=True).reshape(groups, -1, 4)
                bytes_ = np.ascontiguousarray(words.transpose(1, 0, 2))
            parts.append(torch.from_numpy(bytes_.copy()).reshape(-1))
        exact = (codes + low - np.repeat(zeros, group, 1)) * per_element
        signed_bytes = (codes + low).astype(np.int8).view(np.uint8)
        stored = signed_bytes if signed else _packed(codes, fmt.bits, words=True)
    values = torch.from_numpy(np.ascontiguousarray(stored))
    packed = PackedWeight(fmt, (rows, cols), group, values, tuple(parts), torch.bfloat16)
    return GroupWeight(packed, exact)


def misaligned(weight: PackedWeight) -> PackedWeight:
    """The same bytes at odd addresses."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        room = torch.empty(prod(tensor.shape) + 1, dtype=torch.uint8)
        room[1:] = tensor.reshape(-1)
        return room[1:]

    return replace(weight, values=moved(weight.values), scales=tuple(moved(s) for s in weight.scales))
