"""Quantising to small floating-point elements in aten operations: the portable monograph::quantize."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from monograph.ops.dequantize import e8m0_values, per_element
from monograph.ops.formats import (
    E2M1,
    E4M3,
    RULES,
    BlockShape,
    Format,
    Minifloat,
    format_numbered,
    value_table,
)

_NAMES = {number: name for name, number in RULES.items()}
_LARGEST = torch.finfo(torch.float32).max


def encode(element: Minifloat, x: torch.Tensor) -> torch.Tensor:
    """The nearest code, ties to even, saturating; the sign of a zero is kept. `x` holds no NaN."""
    bits = x.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    dropped = 23 - element.mantissa
    half = (1 << (dropped - 1)) - 1 + (magnitude >> dropped & 1)
    normal = (magnitude + half >> dropped) - (127 - element.bias << element.mantissa)
    aligned = 2.0 ** (24 - element.bias - element.mantissa)
    start = torch.full_like(x, aligned).view(torch.int32)
    small = (magnitude.view(torch.float32) + aligned).view(torch.int32) - start
    code = torch.where(magnitude.view(torch.float32) < 2.0 ** (1 - element.bias), small, normal)
    sign = torch.where(bits < 0, element.sign_code, 0)
    return (code.clamp(max=element.largest_code) | sign).to(torch.uint8)


def _e8m0_ceil(x: torch.Tensor) -> torch.Tensor:
    bits = x.view(torch.int32)
    normal = (bits + 0x7FFFFF >> 23).clamp(max=254)
    return torch.where(bits < 0x800000, (bits > 0x400000).int(), normal)


def _mx_scales(fmt: Format, rule: str, absmax: torch.Tensor) -> torch.Tensor:
    """The E8M0 byte of each block."""
    element = fmt.element
    assert element is not None
    largest = element.value(element.largest_code)
    exponent = (element.largest_code >> element.mantissa) - element.bias
    bits = absmax.view(torch.int32)
    if rule == "rceil":
        return _e8m0_ceil(absmax / largest)
    if rule == "transformer-engine":
        return _e8m0_ceil(absmax * (torch.ones_like(absmax) / largest))
    rounding = {
        "floor": 0,
        "ceil": 0x7FFFFF,
        "even": 1 << (22 - element.mantissa),
        "compressed-tensors": 1 << (22 - E2M1.mantissa),
    }[rule]
    return ((bits + rounding >> 23) - exponent).clamp(0, 254)


def _usable(x: torch.Tensor) -> torch.Tensor:
    return (x > 0) & (x <= _LARGEST)


def _tensor_scales(rule: str, absmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(encode, decode) of each matrix."""
    largest = torch.full_like(absmax, 2688.0)
    from_encode = rule in ("compressed-tensors", "transformer-engine")
    encode_scale = (1.0 / absmax) * largest if rule == "compressed-tensors" else largest / absmax
    first = encode_scale if from_encode else absmax / largest
    second = 1.0 / first
    good = _usable(first) & _usable(second)
    first, second = (torch.where(good, t, 1.0) for t in (first, second))
    return (first, second) if from_encode else (second, first)


def _e4m3(x: torch.Tensor, low: float) -> torch.Tensor:
    return encode(E4M3, x.clamp(low, 448.0))


def _nvfp4_scales(
    rule: str, absmax: torch.Tensor, enc: torch.Tensor, dec: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """(E4M3 byte of each block, factor, whether elements are divided by it)."""

    def value(codes: torch.Tensor) -> torch.Tensor:
        return value_table(format_numbered(4), codes.device)[codes.long()]

    if rule == "torchao":
        s = _e4m3(absmax / 6.0 / dec, 2.0**-6)
        return s, enc / value(s), False
    if rule == "transformer-engine":
        sixth = torch.ones_like(enc) / 6.0
        s = _e4m3(absmax * (enc * sixth), 0.0)
        return s, (1.0 / (value(s) * (1.0 / enc))).clamp(max=_LARGEST), False
    if rule == "compressed-tensors":
        s = _e4m3(enc * (absmax / 6.0), 0.0)
        s = torch.where(s == 0, encode(E4M3, torch.full_like(absmax, 0.125)), s)
        return s, value(s) / enc, True
    ratio = absmax / (6.0 * dec)
    s = _e4m3(torch.where(ratio == 0, 1.0, ratio), 2.0**-9)
    return s, value(s) * dec, True


def _fp8_scales(rule: str, scale_bytes: int, absmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """(stored scale of each block, factor, whether elements are divided by it)."""
    inverse = rule in ("transformers", "transformer-engine")
    scale, factor = absmax / 448.0, (1.0 / absmax) * 448.0
    if rule == "transformer-engine":
        factor = torch.full_like(absmax, 448.0) / absmax
        factor = (factor.view(torch.int32) & 0x7F800000).view(torch.float32)
    if inverse:
        scale = 1.0 / factor
    empty = ~(_usable(scale) & _usable(1.0 / scale))
    scale = torch.where(empty, 2.0**-23 if rule == "compressed-tensors" else 1.0, scale)
    factor = torch.where(empty, 1.0 / scale, factor)
    if scale_bytes == 1:
        code = _e8m0_ceil(scale).to(torch.uint8)
        return code, e8m0_values(254 - code), False
    if scale_bytes == 2:
        stored = scale.bfloat16()
        return stored, 1.0 / stored.float() if inverse else stored.float(), not inverse
    return scale, factor if inverse else scale, not inverse


def _block_absmax(fmt: Format, magnitude: torch.Tensor, shape: Sequence[int], block: int) -> torch.Tensor:
    if fmt.shape is not BlockShape.SQUARE:
        return magnitude.reshape(-1, block).amax(1)
    down, across = fmt.grid(shape, block)[-2:]
    rows = shape[-2] if len(shape) > 1 else 1
    matrices = magnitude.reshape(-1, rows, shape[-1])
    padded = torch.nn.functional.pad(matrices, (0, across * block - shape[-1], 0, down * block - rows))
    return padded.reshape(-1, down, block, across, block).amax((2, 4)).reshape(-1)


def quantize_elements(
    fmt: Format,
    flat: torch.Tensor,
    finite: torch.Tensor,
    shape: Sequence[int],
    block: int,
    rule: int,
    scale_bytes: int,
) -> list[torch.Tensor]:
    """[values, block scales] or [values, block scales, tensor scale], all uint8 and flat."""
    assert fmt.element is not None
    grid = fmt.grid(shape, block)
    name = _NAMES[rule or fmt.rule_number("default")]
    magnitude = torch.where(finite, flat.abs(), 0.0)
    empty = flat.numel() == 0
    absmax = flat.new_zeros(prod(grid)) if empty else _block_absmax(fmt, magnitude, shape, block)
    tail = []
    zero = -0.0
    if fmt.tensor_scale:
        matrices = prod(shape[:-2])
        largest = flat.new_zeros(matrices) if empty else magnitude.reshape(matrices, -1).amax(1)
        enc, dec = _tensor_scales(name, largest)
        tail = [enc if fmt.tensor_scale == "divides" else dec]
        per_block = [t.repeat_interleave(absmax.numel() // max(matrices, 1)) for t in (enc, dec)]
        stored, factor, divide = _nvfp4_scales(name, absmax, *per_block)
        zero = 0.0 if divide else -0.0
    elif fmt.shape is BlockShape.SQUARE:
        stored, factor, divide = _fp8_scales(name, scale_bytes or fmt.scale_bytes(None), absmax)
    else:
        code = _mx_scales(fmt, name, absmax).to(torch.uint8)
        stored, factor, divide = code, e8m0_values(254 - code), False
    spread = per_element(fmt, factor, shape, block)
    scaled = (flat / spread if divide else flat * spread) + zero
    scaled = torch.where(flat.isinf(), flat, torch.where(flat.isnan(), 0.0, scaled))
    codes = encode(fmt.element, scaled)
    values = codes if fmt.bits == 8 else codes[::2] | codes[1::2] << 4
    return [values, *(t.contiguous().view(torch.uint8) for t in (stored, *tail))]
