"""Streams, captured graphs, and memory against the formula."""

from __future__ import annotations

from functools import partial

import torch

from monograph.diagnosis.selftest.bit_patterns import floats
from monograph.diagnosis.selftest.case import Case, Figures, require
from monograph.diagnosis.selftest.device import Device
from monograph.diagnosis.selftest.products import weight_of

ROWS, COLS, BATCH = 2048, 2048, 64
SCRATCH_BYTES = 16 << 20  # that an operator may take beside a dense weight; docs/explain/gpu.md


Weight = tuple[torch.Tensor, list[torch.Tensor], list[int]]


def _product(device: Device) -> tuple[torch.Tensor, Weight]:
    packed = weight_of("nf4", ROWS, COLS).to(device.where)
    x = floats(BATCH * COLS, salt=70).to(torch.bfloat16).reshape(BATCH, COLS).to(device.where)
    return x, (packed.values, list(packed.scales), packed.layout)


def side_streams(device: Device) -> Figures:
    """Work on another stream reads what the current one has written last, and the other way round."""
    x, weight = _product(device)
    wanted = device.linear(x * 2, *weight)
    for number in range(8):
        fresh = x * 2  # in flight when the side stream begins
        got = device.on_side_stream(partial(device.linear, fresh, *weight))
        require(torch.equal(got, wanted), f"round {number}: a side stream gives another result")
    return {"rounds": 8}


def captured_graph(device: Device) -> Figures:
    """A captured product is replayed on new inputs: no synchronisation, no allocation that replay misses."""
    x, weight = _product(device)
    held = x.clone()
    out, replay = device.captured(lambda: device.linear(held, *weight))
    for factor in (1.0, 2.0, -0.5):
        held.copy_(x * factor)
        replay()
        device.synchronize()
        wanted = device.linear(x * factor, *weight)
        require(torch.equal(out, wanted), f"a replay with inputs times {factor} gives another result")
    return {"replays": 3}


def memory_bound(result_bytes: int, dense_bytes: int) -> int:
    """What a product may hold at its peak: its result, one dense weight and bounded scratch."""
    return result_bytes + dense_bytes + SCRATCH_BYTES


def memory(device: Device) -> Figures:
    x, (values, scales, layout) = _product(device)
    dense = ROWS * COLS * x.element_size()
    dy = device.linear(x, values, scales, layout)
    works = {
        "dequantize": (lambda: device.dequantize(values, scales, layout, torch.bfloat16), 0),
        "linear": (lambda: device.linear(x, values, scales, layout), BATCH * ROWS * 2),
        "linear_dx": (lambda: device.linear_dx(dy, values, scales, layout), BATCH * COLS * 2),
    }
    figures: Figures = {}
    for name, (work, result) in works.items():
        peak, bound = device.peak_bytes(work), memory_bound(result, dense)
        figures[name] = {"peak_bytes": peak, "bound_bytes": bound}
        require(peak <= bound, f"{name}: held {peak} bytes at its peak, wanted at most {bound}", figures)
    return figures


CASES = (
    Case("side streams", side_streams),
    Case("capture and replay of a graph", captured_graph),
    Case("memory against the formula", memory),
)
