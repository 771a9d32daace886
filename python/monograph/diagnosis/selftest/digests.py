"""Dequantised values and quantised bytes against SHA-256 digests of the CPU's, which are committed.

Dequantise: every code under every scale byte, or under special and hashed float scales; odd sizes and tails;
three dtypes; nested or not. digests.json is made by `python -m monograph.diagnosis.selftest`, and the tests
compare it with the CPU.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Iterator
from functools import partial

import torch

from monograph.diagnosis.selftest.bit_patterns import as_bytes, floats, hashed, special_floats
from monograph.diagnosis.selftest.case import Case, Figures, require
from monograph.diagnosis.selftest.device import Device, HostDevice
from monograph.ops.formats import FORMATS, BlockShape, Format

FILE = pathlib.Path(__file__).with_name("digests.json")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Packed = tuple[torch.Tensor, list[torch.Tensor], list[int]]


def _scale_bytes(kind: str, count: int) -> torch.Tensor:
    """`count` scales of a type: all bytes, or special floats and then hashed ones."""
    if kind in ("e8m0", "e4m3"):
        return torch.arange(count).to(torch.uint8)
    numbers = torch.cat([special_floats(), floats(max(count, 32), salt=7)])[:count]
    return as_bytes(numbers.to(torch.bfloat16 if kind == "bfloat16" else torch.float32))


def _nested(blocks: int) -> list[torch.Tensor]:
    """Codes, groups, map and offset of double-quantised scales; a fused multiply-add would change them."""
    groups = -(-blocks // 256)
    return [
        hashed(blocks, salt=8),
        as_bytes(floats(groups, salt=9)),
        as_bytes(floats(256, salt=10, exponents=(-7, 0))),
        as_bytes(floats(1, salt=11, exponents=(-5, -4))),
    ]


def packed_cases(fmt: Format) -> Iterator[tuple[str, Packed]]:
    """Weights of a format, each with a name."""
    block, codes = fmt.default_block, 512 if fmt.bits == 4 else 256
    every = torch.arange(256).to(torch.uint8)
    if fmt.shape is BlockShape.SQUARE:
        shape = (130, 2 * block + 77)
        values = hashed(shape[0] * shape[1], salt=5)
        for kind in fmt.scale_types:
            scales = torch.cat([_scale_bytes(kind, 256)[-40:] for _ in range(6)])
            size = fmt.scale_bytes(kind)
            yield f"{kind} scales, odd", (values, [scales[: 6 * size]], [fmt.number, block, *shape])
        return
    kind = fmt.scale_types[0]
    units = 256 if kind in ("e8m0", "e4m3") else 64
    size = fmt.scale_bytes(kind)
    layout = [fmt.number, block, units, codes]
    per_unit = _scale_bytes(kind, units).reshape(units, size)
    scales = per_unit.repeat_interleave(codes // block, 0).reshape(-1)
    tensor = [as_bytes(floats(1, salt=6))] if fmt.tensor_scale else []
    yield "every code", (every.repeat(units), [scales, *tensor], layout)
    if fmt.double_quant:
        yield "nested", (every.repeat(units), _nested(units * codes // block), layout)
    if fmt.shape is BlockShape.FLAT:
        odd, blocks = (7, 71), -(-7 * 71 // block)
        values = hashed(fmt.packed_bytes(7 * 71), salt=12)
        yield "odd size", (values, [_scale_bytes(kind, blocks)], [fmt.number, block, *odd])
        yield "odd size, nested", (values, _nested(blocks), [fmt.number, block, *odd])


def digest(tensor: torch.Tensor) -> str:
    """Of the values; a NaN counts as one, whatever its payload."""
    host = tensor.cpu()
    if host.is_floating_point():
        host = torch.where(host.isnan(), torch.full_like(host, float("nan")).abs(), host)
    return hashlib.sha256(as_bytes(host).numpy().tobytes()).hexdigest()


def dequantized(fmt: Format, device: Device) -> Figures:
    """Digests by name of the case and dtype."""
    found = {}
    for name, (values, scales, layout) in packed_cases(fmt):
        there = values.to(device.where), [s.to(device.where) for s in scales]
        for dtype in DTYPES:
            dense = device.dequantize(*there, layout, dtype)
            found[f"{name}, {str(dtype).removeprefix('torch.')}"] = digest(dense)
    return found


def quantized(fmt: Format, device: Device) -> Figures:
    found = {}
    for dtype in DTYPES:
        weight = floats(96 * 256, salt=13).to(dtype).reshape(96, 256).to(device.where)
        for double_quant in (False, True) if fmt.double_quant else (False,):
            parts = device.quantize(weight, fmt.name, double_quant)
            name = f"{'nested, ' if double_quant else ''}{str(dtype).removeprefix('torch.')}"
            found[name] = digest(torch.cat([part.reshape(-1).cpu() for part in parts]))
    return found


WORK = {"dequantize": dequantized, "quantize": quantized}


def committed() -> dict[str, Figures]:
    """By name of a case of the self-test."""
    return json.loads(FILE.read_text())


def compared(operator: str, fmt: Format, device: Device) -> Figures:
    found, wanted = WORK[operator](fmt, device), committed()[f"{operator} {fmt.name}"]
    wrong = [name for name, value in wanted.items() if found.get(name) != value]
    require(
        found.keys() == wanted.keys() and not wrong,
        f"{len(wrong)} of {len(wanted)} digests differ from the CPU's: {', '.join(wrong[:3])}",
        found,
    )
    return found


def of_the_cpu() -> dict[str, Figures]:
    device = HostDevice()
    return {f"{op} {fmt.name}": work(fmt, device) for op, work in WORK.items() for fmt in FORMATS.values()}


CASES = tuple(Case(f"{op} {fmt.name}", partial(compared, op, fmt)) for op in WORK for fmt in FORMATS.values())
