"""Packed and plain weights for valid calls of operators, small and drawn at random."""

from __future__ import annotations

import functools
from random import Random
from typing import Any

import monograph as mg
from support.hostile_file_calls import DTYPES, floats

FORMATS = ("nf4", "fp4", "mxfp4", "mxfp8", "nvfp4", "nvfp4-divide", "fp8-block", "plain")


@functools.cache
def _packed(name: str, rows: int, cols: int, double: bool) -> mg.PackedWeight:
    return mg.quantize(floats(Random(rows), rows, cols), name, double_quant=double)


def weight(r: Random, rows: int, cols: int, name: str | None = None) -> list[Any]:
    """[values, scales, layout] in tensors of their own."""
    name = name or r.choice(FORMATS)
    if name == "plain":
        return [floats(r, rows, cols, dtype=r.choice(DTYPES)), [], [0, 0, rows, cols]]
    double = name in ("nf4", "fp4") and r.random() < 0.5
    if r.random() < 0.3:  # rows of a larger weight: a layout with a version and, often, an origin
        before = r.choice((1, 3, 130))
        packed = _packed(name, before + rows, cols, double).slice_rows(before, rows)
        layout = [-1, packed.format.number, packed.block_size, 2, rows, cols, packed.origin, 0]
        return [packed.values.clone(), [s.clone() for s in packed.scales], layout]
    packed = _packed(name, rows, cols, double)
    return [packed.values.clone(), [s.clone() for s in packed.scales], list(packed.layout)]


def sizes(r: Random) -> tuple[list[int], int, int]:
    lead = r.choice(([1], [3], [2, 2], [17]))
    return lead, r.choice((1, 8, 33)), r.choice((32, 64, 96))
