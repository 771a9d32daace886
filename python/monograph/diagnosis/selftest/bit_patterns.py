"""Inputs of the self-test, the same on every machine: integers of an index, never a random generator."""

from __future__ import annotations

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def words(count: int, salt: int) -> torch.Tensor:
    """32 bits for each index, as int64: Wang's integer mix, in arithmetic that is exact everywhere."""
    x = torch.arange(count, dtype=torch.int64) + (salt << 20)
    for multiplier in (0x7FEB352D, 0x68E31DA5):
        x = ((x ^ (x >> 16)) * multiplier) & 0xFFFFFFFF
    return x ^ (x >> 16)


def hashed(count: int, salt: int) -> torch.Tensor:
    """Bytes."""
    return (words(count, salt) & 255).to(torch.uint8)


def floats(count: int, salt: int, exponents: tuple[int, int] = (-12, 4)) -> torch.Tensor:
    """float32 with full mantissas and both signs, magnitudes from 2^first to 2^last."""
    first, last = exponents
    found = words(count, salt)
    exponent = 127 + first + (found >> 24) % (last - first)
    bits = (found & 0x7FFFFF) | exponent << 23
    sign = (words(count, salt + 1000) & 1).bool()
    magnitude = bits.to(torch.int32).view(torch.float32)
    return torch.where(sign, -magnitude, magnitude)


def special_floats() -> torch.Tensor:
    """Zeros, subnormals, ties of 16-bit types, the ends of their ranges, infinities and NaN."""
    bits = [
        *(0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x3F800000, 0xBFC00000, 0x3F808000),
        *(0x3F818000, 0x3F80FFFF, 0x477FE000, 0x477FF000, 0x33000000, 0x33000001, 0x38800000, 0x387FC000),
        *(0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x40490FDB),
    ]
    return torch.tensor([b - 2**32 if b >= 2**31 else b for b in bits], dtype=torch.int32).view(torch.float32)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor of the host, flat."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def same_bits(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Element by element; any NaN is as good as another, for payloads differ between devices."""
    kind = _BITS[wanted.element_size()]
    same = got.contiguous().view(kind) == wanted.contiguous().view(kind)
    if wanted.is_floating_point():
        same |= got.isnan() & wanted.isnan()
    return same
