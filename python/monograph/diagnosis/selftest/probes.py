"""Each instruction of core/monograph/gpu/prims.h alone: `monograph_cuda::probe_NAME` runs one, a warp of it.

The operators of the library of the device, and what they must give, bit for bit:

    probe_mma_bf16(Tensor a, Tensor b, Tensor c) -> Tensor   c + a b: a [16, 16], b [16, 8], c float32 [16, 8]
    probe_mma_fp16(Tensor a, Tensor b, Tensor c) -> Tensor   the same in float16
    probe_pack_bf16(Tensor x) -> Tensor                      float32 [n], n even: nearest even
    probe_pack_fp16(Tensor x) -> Tensor                      the same to float16
    probe_widen_bf16(Tensor x) -> Tensor                     [n] to float32, every code
    probe_widen_fp16(Tensor x) -> Tensor                     the same from float16
    probe_mul_rn(Tensor x, Tensor y) -> Tensor               float32 [n]: rounded once, never contracted
    probe_add_rn(Tensor x, Tensor y) -> Tensor               the same for a sum
    probe_div_rn(Tensor x, Tensor y) -> Tensor               the same for a quotient
    probe_fma_rn(Tensor x, Tensor y, Tensor z) -> Tensor     x y + z, rounded once
    probe_copy_async(Tensor bytes, int used) -> Tensor       uint8 [n], n a multiple of 16: 0 from `used` on
    probe_shuffle_xor(Tensor x, int mask) -> Tensor          float32 [32]: lane i has x[i ^ mask]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from monograph.diagnosis.selftest.bit_patterns import floats, hashed, same_bits, special_floats
from monograph.diagnosis.selftest.case import Case, Figures, Skipped, require
from monograph.diagnosis.selftest.device import Device

Call = tuple[tuple[Any, ...], torch.Tensor]  # arguments, and what must come out


def _one_hot_mma(dtype: torch.dtype) -> Iterator[Call]:
    """Every element of a times every element of b that it meets, and all of c: places, not sums."""
    c = torch.arange(128, dtype=torch.float32).reshape(16, 8)
    for row in range(16):
        for k in range(16):
            a, b = torch.zeros(16, 16, dtype=dtype), torch.zeros(16, 8, dtype=dtype)
            a[row, k] = 1
            b[k] = torch.arange(1, 9)
            b[(k + 1) % 16] = 100  # must not be met
            yield (a, b, c), c + a.float() @ b.float()


def _pack(dtype: torch.dtype) -> Iterator[Call]:
    x = torch.cat([special_floats(), floats(4096, salt=1)])
    yield (x,), x.to(dtype)


def _pairs(combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Iterator[Call]:
    x = torch.cat([special_floats().repeat_interleave(len(special_floats())), floats(4096, salt=2)])
    y = torch.cat([special_floats().repeat(len(special_floats())), floats(4096, salt=3)])
    yield (x, y), combine(x, y)


def _widen(dtype: torch.dtype) -> Iterator[Call]:
    x = torch.arange(65535, -1, -1).to(torch.uint16).view(dtype)
    yield (x,), x.float()


def _fused() -> Iterator[Call]:
    """Sums whose exact value fits into float64, and differs from that of a rounded product."""
    one = special_floats()
    x, y = one.repeat_interleave(len(one)), one.repeat(len(one))
    a, b = floats(4096, salt=5, exponents=(0, 1)), floats(4096, salt=6, exponents=(0, 1))
    x, y, z = torch.cat([x, a, a]), torch.cat([y, b, b]), torch.cat([torch.zeros_like(x), -(a * b), a])
    yield (x, y, z), (x.double() * y.double() + z.double()).float()


def _copies() -> Iterator[Call]:
    data = hashed(512, salt=4)
    for used in (0, 16, 256, 512):
        yield (data, used), torch.where(torch.arange(512) < used, data, 0).to(torch.uint8)


def _shuffles() -> Iterator[Call]:
    x = torch.arange(32, dtype=torch.float32)
    for mask in (1, 2, 4, 8, 16, 31):
        yield (x, mask), x[torch.arange(32) ^ mask]


# One row, one instruction; a library of the device has all of them.
PROBES: dict[str, Callable[[], Iterator[Call]]] = {
    "mma_bf16": partial(_one_hot_mma, torch.bfloat16),
    "mma_fp16": partial(_one_hot_mma, torch.float16),
    "pack_bf16": partial(_pack, torch.bfloat16),
    "pack_fp16": partial(_pack, torch.float16),
    "widen_bf16": partial(_widen, torch.bfloat16),
    "widen_fp16": partial(_widen, torch.float16),
    "mul_rn": partial(_pairs, torch.mul),
    "add_rn": partial(_pairs, torch.add),
    "div_rn": partial(_pairs, torch.div),
    "fma_rn": _fused,
    "copy_async": _copies,
    "shuffle_xor": _shuffles,
}


def operator(name: str) -> Callable[..., torch.Tensor] | None:
    return getattr(torch.ops.monograph_cuda, f"probe_{name}", None)


def probe(name: str, device: Device) -> Figures:
    found = operator(name)
    if found is None:
        raise Skipped(f"monograph_cuda::probe_{name} is not there: the library of the device is not loaded")
    calls = 0
    for arguments, wanted in PROBES[name]():
        moved = [a.to(device.where) if isinstance(a, torch.Tensor) else a for a in arguments]
        got = found(*moved).cpu()
        wrong = int((~same_bits(got, wanted)).sum()) if got.shape == wanted.shape else -1
        require(wrong == 0, f"call {calls} of {name}: {wrong} of {wanted.numel()} elements are wrong")
        calls += 1
    return {"calls": calls}


CASES = tuple(Case(f"probe {name}", partial(probe, name)) for name in PROBES)
