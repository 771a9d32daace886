"""Blocks of ggml in aten operations: scales beside the values, (code - zero) * scale - minimum.

core/monograph/formats/interleaved.h, ggml_blocks.h and ggml_superblocks.h are the same for kernels. A product
of fp16 numbers and codes is exact in float32, so a compiler may fuse it with the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from monograph.ops.formats import Format

# What four bits mean in iq4_nl and iq4_xs.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
TWICE_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # in ggml_mxfp4


def _fp16(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """float32 [blocks, 1] of the two bytes from `at` on. Copies: a view needs alignment."""
    return blocks[:, at : at + 2].clone().view(torch.float16).float()


def _bits(values: torch.Tensor, fields: int, width: int) -> torch.Tensor:
    """[n, fields, bytes]: field s of each byte, the lowest bits first."""
    place = torch.arange(0, fields * width, width, dtype=torch.uint8, device=values.device)
    return (values[:, None, :] >> place[:, None]) & ((1 << width) - 1)


def _nibbles(values: torch.Tensor, each: int) -> torch.Tensor:
    """One code an element: `each` low nibbles, then the high ones of the same bytes."""
    parts = values.reshape(-1, each)
    return _bits(parts, 2, 4).reshape(values.shape[0], -1)


def _fifth(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """16 where bit i of four bytes is set, for element i."""
    return _bits(blocks[:, at : at + 4], 8, 1).transpose(1, 2).reshape(-1, 32) << 4


def _look_up(table: tuple[int, ...], codes: torch.Tensor) -> torch.Tensor:
    """The table's values as float32 without a table in memory: what a compiler keeps in registers."""
    found = torch.full_like(codes, table[0], dtype=torch.float32)
    for code, value in enumerate(table[1:], 1):
        found = torch.where(codes == code, float(value), found)
    return found


def _half_e8m0(blocks: torch.Tensor) -> torch.Tensor:
    """2^(e - 128), float32 [blocks, 1] of the first bytes: subnormal for 0 and 1."""
    e = blocks[:, :1].int()
    return torch.where(e < 2, 0x00200000 << e.clamp(max=1), (e - 1) << 23).view(torch.float32)


def _each(numbers: torch.Tensor, count: int) -> torch.Tensor:
    return numbers.repeat_interleave(count, dim=1)


def _six_bits(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The eight scales and minima of q4_k and q5_k, times d and dmin."""
    low, high, last = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([low & 63, (last & 15) | (low >> 6 << 4)], 1)
    minima = torch.cat([high & 63, (last >> 4) | (high >> 6 << 4)], 1)
    return _fp16(blocks, 0) * scales.float(), _fp16(blocks, 2) * minima.float()


def _with_minima(blocks: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    scales, minima = _six_bits(blocks)
    return _each(scales, 32) * codes.float() - _each(minima, 32)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _nibbles(blocks[:, :128], 64)
    high = _bits(blocks[:, 128:192].reshape(-1, 32), 4, 2).reshape(-1, 256)
    scales = blocks[:, 192:208].clone().view(torch.int8).float()
    return _each(_fp16(blocks, 208) * scales, 16) * ((low | high << 4).float() - 32)


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    low = _bits(blocks[:, 4:8], 2, 4).transpose(1, 2).reshape(-1, 8)
    high = _bits(blocks[:, 2:4], 4, 2).transpose(1, 2).reshape(-1, 8)
    scales = _fp16(blocks, 0) * ((low | high << 4).float() - 32)
    return _each(scales, 32) * _look_up(IQ4_VALUES, _nibbles(blocks[:, 8:], 16))


def _block_values(name: str, blocks: torch.Tensor) -> torch.Tensor:
    """float32 [blocks, elements] of uint8 [blocks, bytes]."""
    if name == "q8_0":
        return _fp16(blocks, 0) * blocks[:, 2:].clone().view(torch.int8).float()
    if name == "q4_0":
        return _fp16(blocks, 0) * (_nibbles(blocks[:, 2:], 16).float() - 8)
    if name == "iq4_nl":
        return _fp16(blocks, 0) * _look_up(IQ4_VALUES, _nibbles(blocks[:, 2:], 16))
    if name == "ggml_mxfp4":
        return _half_e8m0(blocks) * _look_up(TWICE_E2M1, _nibbles(blocks[:, 1:], 16))
    if name == "q4_1":
        return _fp16(blocks, 0) * _nibbles(blocks[:, 4:], 16).float() + _fp16(blocks, 2)
    if name == "q5_0":
        return _fp16(blocks, 0) * ((_nibbles(blocks[:, 6:], 16) | _fifth(blocks, 2)).float() - 16)
    if name == "q5_1":
        codes = _nibbles(blocks[:, 8:], 16) | _fifth(blocks, 4)
        return _fp16(blocks, 0) * codes.float() + _fp16(blocks, 2)
    if name == "q4_k":
        return _with_minima(blocks, _nibbles(blocks[:, 16:], 32))
    if name == "q5_k":
        fifth = _bits(blocks[:, 16:48], 8, 1).reshape(-1, 256) << 4
        return _with_minima(blocks, _nibbles(blocks[:, 48:], 32) | fifth)
    return _q6_k(blocks) if name == "q6_k" else _iq4_xs(blocks)


def decode_blocks(
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
    if rows * cols == 0:
        return torch.empty(0, dtype=dtype, device=values.device)
    packed = values.reshape(-1, fmt.row_bytes(cols))
    order = scales[0].reshape(-1).clone().view(torch.int32) if scales else None

    def decode(first: int, last: int) -> torch.Tensor:
        some = packed[first:last] if order is None else packed.index_select(0, order[first:last])
        return _block_values(fmt.name, some.reshape(-1, fmt.block_bytes)).to(dtype).reshape(-1)

    if rows * cols <= panel:
        return decode(0, rows)
    out = torch.empty(rows * cols, dtype=dtype, device=values.device)
    step = max(1, panel // cols)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        out[first * cols : last * cols] = decode(first, last)
    return out
