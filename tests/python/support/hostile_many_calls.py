"""Valid calls of the operators of many adapters: what hostile_arguments.py spoils."""

from __future__ import annotations

from random import Random
from typing import Any

import torch

from support.hostile_file_calls import DTYPES, floats
from support.hostile_weights import sizes, weight


def _starts(r: Random, rows: int) -> torch.Tensor:
    """Two or three ranges, empty ones too."""
    inner = sorted(r.choice((0, rows, r.randrange(rows + 1))) for _ in range(r.randrange(1, 3)))
    return torch.tensor([0, *inner, rows])


def linear_many(r: Random) -> list[Any]:
    lead, rows, cols = sizes(r)
    dtype, width = r.choice(DTYPES), r.choice((1, 4))
    starts = _starts(r, torch.Size(lead).numel())
    count = starts.numel() - 1
    ranks = [r.choice((0, 1, width)) for _ in range(count)]
    fused = [r.random() < 0.5 for _ in ranks]
    scaled = [rank > 0 and one and r.random() < 0.5 for rank, one in zip(ranks, fused, strict=True)]
    biased = r.random() < 0.5
    return [
        floats(r, *lead, cols, dtype=dtype),
        *weight(r, rows, cols),
        starts,
        floats(r, *lead, width, dtype=dtype),
        [floats(r, rows, rank) for rank in ranks],
        [floats(r, rank if one else 0, cols) for rank, one in zip(ranks, fused, strict=True)],
        [floats(r, 0 if one else rows, dtype=dtype) for one in scaled] if biased else [],
        [1 + 0.01 * floats(r, rows) if one else torch.empty(0) for one in scaled],
    ]


def linear_many_dx(r: Random) -> list[Any]:
    lead, rows, cols = sizes(r)
    dtype, width = r.choice(DTYPES), r.choice((1, 4))
    starts = _starts(r, torch.Size(lead).numel())
    a = [floats(r, r.choice((0, 1, width)), cols) for _ in range(starts.numel() - 1)]
    du = floats(r, *lead, width, dtype=dtype)
    return [floats(r, *lead, rows, dtype=dtype), *weight(r, rows, cols), starts, du, a]


def low_rank_many(r: Random) -> list[Any]:
    lead, _, cols = sizes(r)
    starts = _starts(r, torch.Size(lead).numel())
    factors = [floats(r, r.choice((0, 1, 4)), cols) for _ in range(starts.numel() - 1)]
    return [floats(r, *lead, cols, dtype=r.choice(DTYPES)), factors, starts, r.choice((4, 9))]


def low_rank_many_dx(r: Random) -> list[Any]:
    lead, rows, _ = sizes(r)
    starts = _starts(r, torch.Size(lead).numel())
    factors = [floats(r, rows, r.choice((0, 1, 4))) for _ in range(starts.numel() - 1)]
    return [floats(r, *lead, rows, dtype=r.choice(DTYPES)), factors, starts, r.choice((4, 9))]


def gram_many(r: Random) -> list[Any]:
    lead, rows, cols = sizes(r)
    dtype, starts = r.choice(DTYPES), _starts(r, torch.Size(lead).numel())
    counts = [[r.choice((0, 1, most)) for _ in range(starts.numel() - 1)] for most in (rows, cols)]
    left, right = floats(r, *lead, rows, dtype=dtype), floats(r, *lead, cols, dtype=dtype)
    return [left, right, starts, *counts, r.choice(DTYPES)]


def gain_backward_many(r: Random) -> list[Any]:
    lead, rows, _ = sizes(r)
    dtype, starts = r.choice(DTYPES), _starts(r, torch.Size(lead).numel())
    dy, y = floats(r, *lead, rows, dtype=dtype), floats(r, *lead, rows, dtype=dtype)
    gain = [1 + 0.01 * floats(r, r.choice((0, rows))) for _ in range(starts.numel() - 1)]
    return [dy, r.choice((None, y)), [g.float() for g in gain], starts]


def sum_rows_many(r: Random) -> list[Any]:
    lead, rows, _ = sizes(r)
    starts = _starts(r, torch.Size(lead).numel())
    need = [r.random() < 0.5 for _ in range(starts.numel() - 1)]
    return [floats(r, *lead, rows, dtype=r.choice(DTYPES)), starts, need]


def seeded_dropout_many(r: Random) -> list[Any]:
    lead, _, cols = sizes(r)
    starts = _starts(r, torch.Size(lead).numel())
    which = [i for i in range(starts.numel() - 1) if r.random() < 0.5]
    streams, shares = [r.randrange(9) for _ in which], [r.choice((0.0, 0.5, 1.0)) for _ in which]
    seeds = torch.arange(starts.numel() - 1)
    return [floats(r, *lead, cols, dtype=r.choice(DTYPES)), starts, seeds, which, streams, shares]
