"""monograph::seeded_dropout_many: each adapter's dropout on its own rows, as on a tensor of its own.

Whose rows are whose is data (`monograph.ops.row_ranges`), and so are the seeds: int64 [adapters]. Of the
adapters `which` the rows have the bits that `seeded_dropout` gives them with their seed, stream and
probability; all other rows are -0.0, which added to any number changes nothing. The gradient is the same
operator on dy. No C++ of ours stands behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from monograph.ops import library  # noqa: F401  (creates the namespace)
from monograph.ops.argument_checks import check_float, check_rows, check_tensors, dtype_name, require
from monograph.ops.autograd import register_autograd
from monograph.ops.row_ranges import check_starts, read_starts, rows_in
from monograph.ops.seeded_dropout import seeded_dropout

MOST_STREAMS = (
    1 << 32
)  # a stream of this operator is taken modulo it; what is above tells streams of adapters apart
_OP = "seeded_dropout_many"

torch.library.define(
    "monograph::seeded_dropout_many",
    "(Tensor x, Tensor starts, Tensor seeds, int[] which, int[] streams, float[] probabilities) -> Tensor",
)


def seeded_dropout_many(
    x: torch.Tensor,
    starts: torch.Tensor,
    seeds: torch.Tensor,
    which: Sequence[int],
    streams: Sequence[int],
    probabilities: Sequence[float],
) -> torch.Tensor:
    """x of the rows of these adapters with each element zeroed, the others scaled; -0.0 elsewhere."""
    return torch.ops.monograph.seeded_dropout_many(x, starts, seeds, which, streams, probabilities)


def _check(
    x: torch.Tensor,
    starts: torch.Tensor,
    seeds: torch.Tensor,
    which: Sequence[int],
    streams: Sequence[int],
    probabilities: Sequence[float],
) -> None:
    check_tensors(_OP, x=x)
    check_tensors(_OP, seeds=seeds)  # on the host, wherever x is
    check_rows(_OP, "x", x)
    check_float(_OP, "x", x)
    kind = f"{dtype_name(seeds.dtype)} {list(seeds.shape)} on {seeds.device}"
    require(seeds.dtype == torch.int64 and seeds.dim() == 1, _OP, f"seeds is {kind}, wanted int64 [adapters]")
    there = seeds.device.type == "cpu" or seeds.device == x.device == torch.device("meta")
    require(there, _OP, f"seeds is on {seeds.device}, wanted cpu")
    check_starts(_OP, starts, seeds.shape[0], x)
    counts = (len(which), len(streams), len(probabilities))
    require(
        len(set(counts)) == 1, _OP, f"{counts} adapters, streams and probabilities, wanted as many of each"
    )
    fits = all(0 <= i < seeds.shape[0] for i in which) and len(set(which)) == len(which)
    require(fits, _OP, f"adapters are {list(which)}, wanted different ones of 0 to {seeds.shape[0] - 1}")
    for p in probabilities:
        require(0 <= p <= 1, _OP, f"probability is {p}, wanted 0 to 1")


@torch.library.impl("monograph::seeded_dropout_many", "CompositeExplicitAutograd")
def _seeded_dropout_many(x, starts, seeds, which, streams, probabilities):  # type: ignore[no-untyped-def]
    _check(x, starts, seeds, which, streams, probabilities)
    begins = read_starts(_OP, starts, seeds.shape[0], x)
    rows = x.reshape(rows_in(x), x.shape[-1])
    out = torch.full_like(rows, -0.0, memory_format=torch.contiguous_format)
    for i, stream, p in zip(which, streams, probabilities, strict=True):
        own = slice(begins[i], begins[i + 1])
        if begins[i + 1] > begins[i]:
            out[own] = seeded_dropout(rows[own].contiguous(), seeds[i].clone(), stream % MOST_STREAMS, p)
    return out.view(x.shape)


@torch.library.register_fake("monograph::seeded_dropout_many")
def _(x, starts, seeds, which, streams, probabilities):  # type: ignore[no-untyped-def]
    _check(x, starts, seeds, which, streams, probabilities)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, starts, seeds, *ctx.rest = inputs
    ctx.save_for_backward(starts, seeds)


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    starts, seeds = ctx.saved_tensors
    return seeded_dropout_many(dy, starts, seeds, *ctx.rest), None, None, None, None, None


register_autograd(_OP, _backward, _setup_context)
