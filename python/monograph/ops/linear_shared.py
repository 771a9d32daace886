"""monograph::linear_shared and monograph::linear_shared_dx: several weights on one x (q, k, v; gate, up).

    y_i = x W_i^T + u_i b_i^T + bias_i
    dx  = sum_i (dy_i W_i + du_i a_i)

x is packed once for all weights, and its gradient is one pass instead of a sum of several tensors. bias, u, b
and a are empty or have one entry a weight; with `a`, u_i is x a_i^T, as in `monograph.ops.linear`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from monograph import _library  # noqa: F401  (the schemas are registered there)
from monograph.ops.linear import PLAIN, as_rows, linear_dx, portable_linear, portable_linear_dx

Tensors = Sequence[torch.Tensor]
_ENTRIES = 5  # of `layouts` a weight: format, block, rows, cols, number of scales


def linear_shared(
    x: torch.Tensor,
    values: Tensors,
    scales: Sequence[Tensors],
    layouts: Sequence[Sequence[int]],
    bias: Tensors = (),
    u: Tensors = (),
    b: Tensors = (),
    a: Tensors = (),
) -> list[torch.Tensor]:
    """One output a weight. `scales[i]` and `layouts[i]` are those that `linear` takes for weight i."""
    flat = [scale for own in scales for scale in own]
    numbers = [n for layout, own in zip(layouts, scales, strict=True) for n in (*layout, len(own))]
    lists = (list(part) for part in (bias, u, b, a))
    return torch.ops.monograph.linear_shared(x, list(values), flat, numbers, *lists)


def _weights(
    values: Tensors, scales: Tensors, layouts: Sequence[int]
) -> list[tuple[torch.Tensor, Tensors, Sequence[int]]]:
    counts = layouts[4::_ENTRIES]
    ends = list(accumulate(counts))
    return [
        (value, scales[end - count : end], layouts[_ENTRIES * i : _ENTRIES * i + 4])
        for i, (value, count, end) in enumerate(zip(values, counts, ends, strict=True))
    ]


def portable_linear_shared(
    x: torch.Tensor,
    values: Tensors,
    scales: Tensors,
    layouts: Sequence[int],
    bias: Tensors,
    u: Tensors,
    b: Tensors,
    a: Tensors,
) -> list[torch.Tensor]:
    """The operator in aten operations, for any device."""
    outputs = []
    for i, weight in enumerate(_weights(values, scales, layouts)):
        own_bias = bias[i] if bias else None
        low = (u[i], b[i]) if u else (None, None)
        outputs.append(portable_linear(x, *weight, own_bias, *low))
    return outputs


def portable_linear_shared_dx(
    dy: Tensors, values: Tensors, scales: Tensors, layouts: Sequence[int], du: Tensors, a: Tensors
) -> torch.Tensor:
    """The input gradient in aten operations, for any device."""
    parts = []
    for i, weight in enumerate(_weights(values, scales, layouts)):
        low = (du[i], a[i]) if du else (None, None)
        parts.append(portable_linear_dx(dy[i], *weight, *low))
    return torch.stack(parts).sum(0)


@torch.library.register_fake("monograph::linear_shared")
def _(x, values, scales, layouts, bias, u, b, a):  # type: ignore[no-untyped-def]
    return [x.new_empty([*x.shape[:-1], rows]) for rows in layouts[2::_ENTRIES]]


@torch.library.register_fake("monograph::linear_shared_dx")
def _(dy, values, scales, layouts, du, a):  # type: ignore[no-untyped-def]
    return dy[0].new_empty([*dy[0].shape[:-1], layouts[3]])


torch.library.impl("monograph::linear_shared", "CompositeExplicitAutograd")(portable_linear_shared)
torch.library.impl("monograph::linear_shared_dx", "CompositeExplicitAutograd")(portable_linear_shared_dx)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, values, scales, layouts, bias, u, b, a = inputs
    ctx.save_for_backward(x if a else None, *values, *scales, *u, *b, *a)
    ctx.layouts = layouts
    ctx.counts = [len(part) for part in (values, scales, u, b, a)]
    ctx.bias_count = len(bias)


def _backward(ctx: Any, dy: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    x, *rest = ctx.saved_tensors
    ends = list(accumulate(ctx.counts))
    values, scales, u, b, a = (rest[end - count : end] for end, count in zip(ends, ctx.counts, strict=True))
    dy = list(dy)
    du = [linear_dx(g, m.to(g.dtype), [], [PLAIN, 0, *m.shape]) for g, m in zip(dy, b, strict=False)]
    dx = None
    if ctx.needs_input_grad[0]:
        low = (du, [m.to(dy[0].dtype) for m in a]) if a else ([], [])
        dx = torch.ops.monograph.linear_shared_dx(dy, values, scales, ctx.layouts, *low)
    dbias = [as_rows(g).sum(0) for g in dy[: ctx.bias_count]]
    db = [(as_rows(g).t() @ as_rows(low)).to(m.dtype) for g, low, m in zip(dy, u, b, strict=False)]
    da = [(as_rows(g).t() @ as_rows(x)).to(m.dtype) for g, m in zip(du, a, strict=False)]
    # With `a`, u is a saved intermediate and gets no gradient of its own.
    return dx, [None] * len(values), [None] * len(scales), None, dbias, [None] * len(u) if a else du, db, da


torch.library.register_autograd("monograph::linear_shared", _backward, setup_context=_setup_context)


@torch.library.impl("monograph::linear_shared", "AutocastCPU")
def _autocast(
    x: torch.Tensor,
    values: Tensors,
    scales: Tensors,
    layouts: Sequence[int],
    bias: Tensors,
    u: Tensors,
    b: Tensors,
    a: Tensors,
) -> list[torch.Tensor]:
    dtype = torch.get_autocast_dtype("cpu")
    bias, u, b, a = ([t.to(dtype) for t in part] for part in (bias, u, b, a))
    with torch.amp.autocast("cpu", enabled=False):
        return torch.ops.monograph.linear_shared(x.to(dtype), values, scales, layouts, bias, u, b, a)


@register_flop_formula(torch.ops.monograph.linear_shared)
def _linear_shared_flops(x, values, scales, layouts, bias, u, b, a, **_):  # type: ignore[no-untyped-def]
    rows = layouts[2::_ENTRIES]
    ranks = [shape[-1] for shape in u] or [0] * len(rows)
    return 2 * prod(x[:-1]) * sum(n * (layouts[3] + r) for n, r in zip(rows, ranks, strict=True))


@register_flop_formula(torch.ops.monograph.linear_shared_dx)
def _linear_shared_dx_flops(dy, values, scales, layouts, du, a, **_):  # type: ignore[no-untyped-def]
    ranks = sum(shape[-1] for shape in du)
    return 2 * prod(dy[0][:-1]) * layouts[3] * (sum(layouts[2::_ENTRIES]) + ranks)
