"""linear and its input gradient: errors against float64, guard bytes around results, the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from monograph.diagnosis.selftest.bit_patterns import floats
from monograph.diagnosis.selftest.case import Case, Figures, require
from monograph.diagnosis.selftest.device import Device
from monograph.ops.formats import FORMATS
from monograph.quant.packed_weight import PackedWeight, quantize

ROWS, COLS = 384, 512  # of the weight
BATCHES = (1, 8, 16, 40, 300)  # SIMT to 8, mma to 16 at least, panels or mma at 40, panels
GUARD, CANARY = 512, 0xA5
RUNS = 100


def weight_of(name: str, rows: int = ROWS, cols: int = COLS) -> PackedWeight:
    """On the host; nested where the format can be."""
    dense = floats(rows * cols, salt=20, exponents=(-8, -4)).reshape(rows, cols).to(torch.bfloat16)
    return quantize(dense, name, double_quant=FORMATS[name].double_quant)


def error_over_bound(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """|error| of x weight^T over its bound, element by element; at most 1 is right.

    Products of 16-bit numbers are exact in float32, K of them are summed there in any order, and the sum is
    rounded to the type of the result: |error| <= K 2^-23 sum |x w| + u |y|.
    """
    x, weight = x.double(), weight.double()
    exact = x @ weight.t()
    unit = torch.finfo(got.dtype).eps
    bound = x.shape[-1] * 2.0**-23 * (x.abs() @ weight.abs().t()) + unit * exact.abs() + 2.0**-140
    return (got.cpu().double() - exact).abs() / bound


@contextmanager
def sums_in_float32() -> Iterator[None]:
    """Without this torch lets cuBLAS add parts of a sum in the type of the result."""
    matmul = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = {name: getattr(matmul, name) for name in names}
    try:
        for name in names:
            setattr(matmul, name, False)
        yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)


def percentiles(values: torch.Tensor) -> dict[str, float]:
    flat = values.flatten().sort().values
    places = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(float(flat[int(p * (len(flat) - 1))]), 6) for name, p in places.items()}


def products_of(device: Device, packed: PackedWeight, dtype: torch.dtype, backward: bool) -> torch.Tensor:
    """Errors over their bounds for each of BATCHES, all in one."""
    there, found = packed.to(device.where), []
    dense = packed.dequantize(dtype)
    for batch in BATCHES:
        size = ROWS if backward else COLS
        x = floats(batch * size, salt=30 + batch, exponents=(-4, 2)).to(dtype).reshape(batch, size)
        multiply = device.linear_dx if backward else device.linear
        got = multiply(x.to(device.where), there.values, list(there.scales), there.layout)
        found.append(error_over_bound(got, x, dense.t() if backward else dense).flatten())
    return torch.cat(found)


@sums_in_float32()
def errors(operator: str, device: Device) -> Figures:
    figures: Figures = {}
    for name in FORMATS:
        for dtype in (torch.bfloat16, torch.float16):
            values = products_of(device, weight_of(name), dtype, operator == "linear_dx")
            key = f"{name}, {str(dtype).removeprefix('torch.')}"
            require(bool(values.isfinite().all()), f"{key}: a result is not finite", figures)
            figures[key] = percentiles(values)
            worst = figures[key]["max"]
            require(worst <= 1, f"{key}: an error is {worst} times its bound against float64", figures)
    return figures


@sums_in_float32()
def low_rank(device: Device) -> Figures:
    """x W^T + u b^T, by a fused kernel or by panels.

    Sums are those of float32, as above. Panels round u b^T to the type of the result, then x W^T + that:
    |error| <= (K + r) 2^-23 sum |terms| + h (1 + h) (|u b^T| + |y|), where h = 2^-8 is half a unit of bf16.
    """
    packed, rank, half = weight_of("nf4"), 16, 2.0**-8
    there, dense = packed.to(device.where), packed.dequantize(torch.bfloat16)
    figures: Figures = {}
    for batch in (5, 16, 300):
        x, u, b = (
            floats(n * m, salt=s, exponents=(-4, 1)).to(torch.bfloat16).reshape(n, m)
            for n, m, s in ((batch, COLS, 40), (batch, rank, 41), (ROWS, rank, 42))
        )
        left, low, right = (t.to(device.where) for t in (x, u, b))
        got = device.linear(left, there.values, list(there.scales), there.layout, None, low, right)
        both, matrix = torch.cat([x, u], 1).double(), torch.cat([dense, b], 1).double()
        exact = both @ matrix.t()
        rounded = exact.abs() + (u.double() @ b.double().t()).abs()
        bound = both.shape[1] * 2.0**-23 * (both.abs() @ matrix.abs().t()) + half * (1 + half) * rounded
        values = (got.cpu().double() - exact).abs() / bound
        key = f"{batch} rows"
        figures[key] = percentiles(values)
        require(
            bool((values <= 1).all()),
            f"{key}: an error is {float(values.max()):.3f} times its bound",
            figures,
        )
    return figures


def guards(device: Device) -> Figures:
    """What lies before and behind a result keeps its bytes: dequantise writes between two guards."""
    checked = 0
    for name in FORMATS:
        packed = weight_of(name, 130, 256)
        there = packed.to(device.where)
        for dtype in (torch.bfloat16, torch.float32):
            size = 130 * 256 * dtype.itemsize
            memory = torch.full((size + 2 * GUARD,), CANARY, dtype=torch.uint8, device=device.where)
            out = memory[GUARD : GUARD + size].view(dtype).view(130, 256)
            device.dequantize_out(there.values, list(there.scales), there.layout, out)
            host = memory.cpu()
            for side, part in (("before", host[:GUARD]), ("behind", host[GUARD + size :])):
                wrong = int((part != CANARY).sum())
                require(wrong == 0, f"{name} {dtype}: {wrong} guard bytes {side} the result were written")
            wanted = packed.dequantize(dtype)
            same = torch.equal(host[GUARD : GUARD + size].view(dtype).view(130, 256), wanted)
            require(same, f"{name} {dtype}: the result between the guards is not the CPU's")
            checked += 1
    return {"results": checked}


def neighbours(device: Device) -> Figures:
    """A product leaves tensors that lie around its own result alone, wherever the allocator puts it."""
    packed = weight_of("nf4").to(device.where)
    x = floats(40 * COLS, salt=50).to(torch.bfloat16).reshape(40, COLS).to(device.where)
    around = [torch.full((40, ROWS), float(i), dtype=torch.bfloat16, device=device.where) for i in range(9)]
    for hole in (1, 3, 5, 7):
        around[hole] = torch.empty(0, dtype=torch.bfloat16, device=device.where)
    results = [device.linear(x, packed.values, list(packed.scales), packed.layout) for _ in range(4)]
    wrong = [i for i, t in enumerate(around) if t.numel() and bool((t != float(i)).any())]
    require(not wrong, f"tensors {wrong} beside the results of linear were written")
    same = all(torch.equal(results[0], other) for other in results[1:])
    require(same, "four results of one product differ")
    return {"tensors": len(around)}


def repeated(device: Device) -> Figures:
    """Each operator RUNS times: the same bits."""
    packed = weight_of("nf4").to(device.where)
    x = floats(40 * COLS, salt=60).to(torch.bfloat16).reshape(40, COLS).to(device.where)
    dy = floats(40 * ROWS, salt=61).to(torch.bfloat16).reshape(40, ROWS).to(device.where)
    labels = (torch.arange(40) * 7 % ROWS).to(device.where)
    head = packed.dequantize(torch.bfloat16)
    scales = list(packed.scales)
    works: dict[str, Callable[[], Any]] = {
        "dequantize": lambda: device.dequantize(packed.values, scales, packed.layout, torch.bfloat16),
        "linear, 1 row": lambda: device.linear(x[:1], packed.values, scales, packed.layout),
        "linear, 40 rows": lambda: device.linear(x, packed.values, scales, packed.layout),
        "linear_dx": lambda: device.linear_dx(dy, packed.values, scales, packed.layout),
        "linear_cross_entropy": lambda: device.loss(x, head, labels),
    }
    for name, work in works.items():
        first = work()
        for number in range(1, RUNS):
            again = work()
            same = torch.equal(again.view(torch.uint8), first.view(torch.uint8))
            require(same, f"{name}: run {number + 1} of {RUNS} has other bits than the first")
    return {"runs": RUNS, "operators": list(works)}


CASES = (
    Case("linear against float64", partial(errors, "linear")),
    Case("linear_dx against float64", partial(errors, "linear_dx")),
    Case("linear with a low-rank part against float64", low_rank),
    Case("guard bytes around dequantised weights", guards),
    Case("tensors beside a product", neighbours),
    Case(f"the same bits in {RUNS} runs", repeated),
)
