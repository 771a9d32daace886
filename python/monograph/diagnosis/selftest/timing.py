"""Times beside bitsandbytes on the same card: figures for the report, no test passes or fails by them."""

from __future__ import annotations

import importlib.util
import statistics
from typing import Any

import torch

from monograph.diagnosis.selftest.bit_patterns import floats
from monograph.diagnosis.selftest.case import Case, Figures, Skipped
from monograph.diagnosis.selftest.device import Device
from monograph.quant.packed_weight import quantize

ROUNDS = 15
LEAST_MS = 5.0  # of one measurement
SIZES = {"cuda": (4096, (1, 8, 16, 64, 256, 2048)), "cpu": (256, (1, 16))}


def quartiles(values: list[float]) -> list[float]:
    return [round(q, 5) for q in statistics.quantiles(values, n=4)]


def peer(weight: torch.Tensor) -> Any:
    """bitsandbytes' layer of the weight, nf4 with nested scales, on the device of the weight."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise Skipped("bitsandbytes is not installed")
    import bitsandbytes.nn

    peers: Any = bitsandbytes.nn
    rows, cols = weight.shape
    layer = peers.Linear4bit(
        cols, rows, bias=False, compute_dtype=torch.bfloat16, compress_statistics=True, quant_type="nf4"
    )
    layer.weight = peers.Params4bit(
        weight.cpu(), requires_grad=False, compress_statistics=True, quant_type="nf4"
    )
    return layer.to(weight.device)


def beside_bitsandbytes(device: Device) -> Figures:
    """linear of nf4 with nested scales, paired rounds; clocks before and after."""
    size, batches = SIZES[device.name]
    weight = floats(size * size, salt=90, exponents=(-8, -4)).to(torch.bfloat16).reshape(size, size)
    packed = quantize(weight, "nf4", double_quant=True).to(device.where)
    theirs = peer(weight.to(device.where))
    figures: Figures = {"clocks_before": device.clocks(), "weight": [size, size], "rows": {}}
    with torch.no_grad():
        for rows in batches:
            x = floats(rows * size, salt=91).to(torch.bfloat16).reshape(rows, size).to(device.where)
            works = {
                "monograph": lambda x=x: device.linear(x, packed.values, list(packed.scales), packed.layout),
                "bitsandbytes": lambda x=x: theirs(x),
            }
            repeats = {}
            for name, work in works.items():
                device.milliseconds(work, 1)
                repeats[name] = max(1, int(LEAST_MS / max(device.milliseconds(work, 1), 1e-3)))
            times: dict[str, list[float]] = {name: [] for name in works}
            for _ in range(ROUNDS):
                for name, work in works.items():
                    times[name].append(device.milliseconds(work, repeats[name]))
            figures["rows"][str(rows)] = {f"{name}_ms_quartiles": quartiles(t) for name, t in times.items()}
    figures["clocks_after"] = device.clocks()
    return figures


CASES = (Case("times beside bitsandbytes", beside_bitsandbytes),)
