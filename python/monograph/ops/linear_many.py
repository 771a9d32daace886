"""monograph::linear_many and monograph::linear_many_dx: many LoRA adapters on one packed weight, in one call.

For the rows of adapter i, and for no others (`monograph.ops.row_ranges`):

    y  = x W^T + u b[i]^T + bias[i]        with gain[i]: y = gain[i] (x W^T + u b[i]^T), rounded, + bias[i]
    dx = dy W  + du a[i]

An adapter may have any rank, and be without factors, bias or gain here: a tensor without elements says so, or
an empty list for all. Its u stands in the first columns of its rows; the others are not read. As in `linear`,
u is a tensor of its own with a gradient, as dropout wants it, or, with a[i], u is x a[i]^T and counts as a
saved intermediate: dx has du a[i] in the same pass, and a[i] its gradient du^T x. `low_rank_many` makes u.

What range i gets, forward and backward, has the bits that `linear` or `linear_scaled` give for this adapter
alone on these rows; nothing of another adapter is added, not even zeros, so its infinities stay its own.
Differentiable once; W is frozen. No forward mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from monograph.ops import library  # noqa: F401  (the schemas are registered there)
from monograph.ops.argument_checks import (
    check_beside,
    check_rows,
    check_tensors,
    check_vector,
    check_weight,
    require,
)
from monograph.ops.autocast import autocast_rule, cast, without_autocast
from monograph.ops.autograd import register_autograd, register_not_differentiable
from monograph.ops.gain_backward_many import gain_backward_many
from monograph.ops.layout import read_matrix
from monograph.ops.linear import check_linear_layout
from monograph.ops.low_rank_many import factor_gradients, low_rank_many_dx
from monograph.ops.row_ranges import (
    Tensors,
    check_count,
    check_factors,
    check_starts,
    ranges,
    read_starts,
    rows_in,
)
from monograph.ops.sum_rows_many import sum_rows_many


def linear_many(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: Sequence[torch.Tensor],
    layout: Sequence[int],
    starts: torch.Tensor,
    u: torch.Tensor,
    b: Tensors,
    a: Tensors = (),
    bias: Tensors = (),
    gain: Tensors = (),
) -> torch.Tensor:
    """[..., rows of W] in the dtype of x; u [..., width], b[i] [rows of W, rank i], a[i] [rank i, cols of W],
    bias[i] [rows of W] in the dtype of x, gain[i] [rows of W] in float32."""
    behind = _behind_the_gain(bias, gain)
    if not any(behind):
        return torch.ops.monograph.linear_many(
            x, values, scales, layout, starts, u, list(b), list(a), list(bias), list(gain)
        )
    within = [t.new_empty(0) if later else t for t, later in zip(bias, behind, strict=True)]
    y = torch.ops.monograph.linear_many(
        x, values, scales, layout, starts, u, list(b), list(a), within, list(gain)
    )
    return y + _bias_of_rows(y, starts, bias, behind)


def _behind_the_gain(bias: Tensors, gain: Tensors) -> list[bool]:
    """Whose bias is added to what is rounded already, as `linear_scaled(...) + bias` adds it."""
    if not bias or not gain or len(bias) != len(gain):
        return []
    return [t.numel() > 0 and g.numel() > 0 for t, g in zip(bias, gain, strict=True)]


def _bias_of_rows(
    y: torch.Tensor, starts: torch.Tensor, bias: Tensors, behind: Sequence[bool]
) -> torch.Tensor:
    """Beside each row of y its adapter's bias; -0.0, which changes nothing, where that is added already."""
    nothing = y.new_full((y.shape[-1],), -0.0)
    table = torch.stack([t if later else nothing for t, later in zip(bias, behind, strict=True)])
    rows = torch.arange(rows_in(y), device=starts.device)
    owner = torch.searchsorted(starts, rows, right=True) - 1
    return table[owner.to(y.device)].view(y.shape)


def linear_many_dx(
    dy: torch.Tensor,
    values: torch.Tensor,
    scales: Sequence[torch.Tensor],
    layout: Sequence[int],
    starts: torch.Tensor,
    du: torch.Tensor,
    a: Tensors = (),
) -> torch.Tensor:
    """dy W + du a[i] on the rows of adapter i, in the dtype of dy: the input gradient of `linear_many`."""
    return torch.ops.monograph.linear_many_dx(dy, values, scales, layout, starts, du, list(a))


@dataclass(frozen=True)
class _Pass:
    """How the operands of a pass are called. side: the dimension of the weight and of a factor whose size is
    that of x and of u."""

    op: str
    x: str
    u: str
    factors: str
    side: int


_FORWARD = _Pass("linear_many", "x", "u", "b", 1)
_DX = _Pass("linear_many_dx", "dy", "du", "a", 0)


def _check_pass(
    of: _Pass,
    x: torch.Tensor,
    values: torch.Tensor,
    scales: Tensors,
    layout: Sequence[int],
    u: torch.Tensor,
    factors: Tensors,
) -> tuple[int, int]:
    """What both passes are given; (rows, cols) of W."""
    op, side = of.op, of.side
    require(u is not None, op, f"{of.u} is None, wanted a tensor")
    check_tensors(op, values=values, scales=scales, **{of.x: x, of.u: u}, **{of.factors: factors})
    shape = check_weight(op, values, scales, layout)
    check_rows(op, of.x, x, None, shape[side])
    check_beside(op, of.u, u, x)
    size = (shape[0], None) if side else (None, shape[1])
    check_factors(op, of.factors, factors, [size] * len(factors))
    for i, factor in enumerate(factors):
        found, rank = f"{of.u} has {u.shape[-1]} columns", factor.shape[side]
        require(rank <= u.shape[-1], op, f"{found}, wanted {rank} or more for {of.factors}[{i}]")
    return shape


def _check(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: Tensors,
    layout: Sequence[int],
    u: torch.Tensor,
    b: Tensors,
    a: Tensors,
    bias: Tensors,
    gain: Tensors,
) -> None:
    op = _FORWARD.op
    check_tensors(op, a=a, bias=bias, gain=gain)
    rows, cols = _check_pass(_FORWARD, x, values, scales, layout, u, b)
    for name, given in (("a", a), ("bias", bias), ("gain", gain)):
        check_count(op, name, given, len(b), may_be_empty=True)
    check_factors(op, "a", a, [(None, cols)] * len(a))
    for i, factor in enumerate(a):
        rank, given_rank = b[i].shape[1], factor.shape[0]
        found = f"a[{i}] has {given_rank} rows"
        require(given_rank in (0, rank), op, f"{found}, wanted {rank} as the columns of b[{i}], or 0")
    wide = torch.promote_types(x.dtype, torch.float32)
    for name, given, dtype in (("bias", bias, x.dtype), ("gain", gain, wide)):
        for i, vector in enumerate(given):
            if vector.numel():
                check_vector(op, f"{name}[{i}]", vector, rows, dtype)
    for i, factor in enumerate(gain):
        if factor.numel():
            fused = bool(a) and a[i].shape[0] > 0
            require(fused, op, f"gain[{i}] is given without a[{i}], wanted a low-rank part with a")
            both = bool(bias) and bias[i].numel() > 0
            require(not both, op, f"gain[{i}] and bias[{i}] are given, wanted the bias added to the result")


def portable_linear_many(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: Sequence[torch.Tensor],
    layout: Sequence[int],
    starts: torch.Tensor,
    u: torch.Tensor,
    b: Tensors,
    a: Tensors,
    bias: Tensors,
    gain: Tensors,
) -> torch.Tensor:
    """One call of `linear` or `linear_scaled` for each adapter that has rows."""
    _check(x, values, scales, layout, u, b, a, bias, gain)
    read = read_starts("linear_many", starts, len(b), x)
    rows, _ = read_matrix("linear_many", layout).shape
    out = x.new_empty([*x.shape[:-1], rows])
    if rows == 0:
        return out
    y, xs, us = out.view(-1, rows), x.reshape(rows_in(x), x.shape[-1]), u.reshape(rows_in(u), u.shape[-1])
    for i, own in ranges(read):
        rank = b[i].shape[1]
        low = (us[own, :rank], b[i]) if rank else (None, None)
        if gain and gain[i].numel():
            y[own] = torch.ops.monograph.linear_scaled(xs[own], values, scales, layout, gain[i], *low, a[i])
            continue
        own_bias = bias[i] if bias and bias[i].numel() else None
        y[own] = torch.ops.monograph.linear(xs[own], values, scales, layout, own_bias, *low, None)
    return out


def portable_linear_many_dx(
    dy: torch.Tensor,
    values: torch.Tensor,
    scales: Sequence[torch.Tensor],
    layout: Sequence[int],
    starts: torch.Tensor,
    du: torch.Tensor,
    a: Tensors,
) -> torch.Tensor:
    """One call of `linear_dx` for each adapter that has rows."""
    op = _DX.op
    rows, cols = _check_pass(_DX, dy, values, scales, layout, du, a)
    count = starts.shape[0] - 1 if starts.dim() == 1 else len(a)
    read = read_starts(op, starts, len(a) or count, dy)
    out = dy.new_empty([*dy.shape[:-1], cols])
    if cols == 0:
        return out
    dx, dys, dus = out.view(-1, cols), dy.reshape(rows_in(dy), rows), du.reshape(rows_in(du), du.shape[-1])
    for i, own in ranges(read):
        rank = a[i].shape[0] if a else 0
        low = (dus[own, :rank], a[i]) if rank else (None, None)
        dx[own] = torch.ops.monograph.linear_dx(dys[own], values, scales, layout, *low)
    return out


torch.library.impl("monograph::linear_many", "CompositeExplicitAutograd")(portable_linear_many)
torch.library.impl("monograph::linear_many_dx", "CompositeExplicitAutograd")(portable_linear_many_dx)


@torch.library.register_fake("monograph::linear_many")
def _(x, values, scales, layout, starts, u, b, a, bias, gain):  # type: ignore[no-untyped-def]
    op = "linear_many"
    check_tensors(op, x=x, values=values, scales=scales, u=u, b=b, a=a, bias=bias, gain=gain)
    check_starts(op, starts, len(b), x)
    for name, given in (("a", a), ("bias", bias), ("gain", gain)):
        check_count(op, name, given, len(b), may_be_empty=True)
    rows, _ = check_linear_layout(op, "x", x, layout)
    return x.new_empty([*x.shape[:-1], rows])


@torch.library.register_fake("monograph::linear_many_dx")
def _(dy, values, scales, layout, starts, du, a):  # type: ignore[no-untyped-def]
    check_tensors("linear_many_dx", dy=dy, values=values, scales=scales, du=du, a=a)
    check_starts("linear_many_dx", starts, len(a) or starts.numel() - 1, dy)
    _, cols = check_linear_layout("linear_many_dx", "dy", dy, layout)
    return dy.new_empty([*dy.shape[:-1], cols])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, values, scales, layout, starts, u, b, a, bias, gain = inputs
    if values.requires_grad:
        raise ValueError("linear_many: the weight requires a gradient, wanted a frozen one")
    needs_x = any(factor.requires_grad for factor in a)
    y = output if any(factor.requires_grad for factor in gain) else None
    lists = (scales, b, a, gain)
    ctx.save_for_backward(x if needs_x else None, y, values, starts, u, *(t for part in lists for t in part))
    ctx.layout = layout
    ctx.counts = [len(part) for part in lists]
    ctx.bias_dtypes = [t.dtype if t.numel() else None for t in bias]


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, y, values, starts, u, *rest = ctx.saved_tensors
    ends = list(accumulate(ctx.counts))
    scales, b, a, gain = (rest[end - count : end] for end, count in zip(ends, ctx.counts, strict=True))
    needs = ctx.needs_input_grad
    needs_b, needs_a, needs_bias, needs_gain = ([bool(n) for n in part] for part in needs[6:10])
    dbias: list[Any] = [None] * len(needs_bias)
    if any(needs_bias):
        needs_bias = [n and dtype is not None for n, dtype in zip(needs_bias, ctx.bias_dtypes, strict=True)]
        sums = sum_rows_many(dy, starts, needs_bias)
        dbias = [
            g.to(dtype) if n else None for g, dtype, n in zip(sums, ctx.bias_dtypes, needs_bias, strict=True)
        ]
    dgain: list[Any] = [None] * len(gain)
    if any(g.numel() for g in gain):
        dy, found = gain_backward_many(dy, y, gain, starts)
        dgain = [g if n else None for g, n in zip(found or dgain, needs_gain, strict=True)]
    dtype, width = dy.dtype, u.shape[-1]
    # With a[i], u is a saved intermediate and gets no gradient of its own.
    fused = [bool(a) and a[i].shape[0] > 0 for i in range(len(b))]
    du = own_du = dx = None
    if any(fused) and (needs[0] or any(needs_a)):
        du = low_rank_many_dx(dy, _some(b, fused, dtype), starts, width)
    if needs[5]:
        own_du = low_rank_many_dx(dy, _some(b, [not one for one in fused], dtype), starts, width)
    if needs[0]:
        low = (u, ()) if du is None else (du, [factor.to(dtype) for factor in a])
        dx = linear_many_dx(dy, values, scales, ctx.layout, starts, *low)
    db = factor_gradients(dy, u, starts, b, needs_b, of_left=False)
    da: list[Any] = [None] * len(a)
    if du is not None and any(needs_a):
        da = factor_gradients(du, x, starts, a, needs_a, of_left=True)
    return dx, None, [None] * len(scales), None, None, own_du, db, da, dbias, dgain


def _some(b: Tensors, chosen: Sequence[bool], dtype: torch.dtype) -> list[torch.Tensor]:
    """The factors of the chosen adapters, and none of the others."""
    return [
        factor.to(dtype).contiguous() if one else factor.new_empty((factor.shape[0], 0), dtype=dtype)
        for factor, one in zip(b, chosen, strict=True)
    ]


register_autograd("linear_many", _backward, _setup_context)
register_not_differentiable("linear_many_dx")


@autocast_rule("linear_many")
def _autocast(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: Sequence[torch.Tensor],
    layout: Sequence[int],
    starts: torch.Tensor,
    u: torch.Tensor,
    b: Tensors,
    a: Tensors,
    bias: Tensors,
    gain: Tensors,
) -> torch.Tensor:
    x, u = cast(x), cast(u)
    b, a, bias = ([cast(t) for t in part] for part in (b, a, bias))
    with without_autocast(x):
        return torch.ops.monograph.linear_many(x, values, scales, layout, starts, u, b, a, bias, gain)


# Whose rows are whose is not known from shapes: counted as if all rows had the highest rank.
@register_flop_formula(torch.ops.monograph.linear_many)
def _flops(x, values, scales, layout, starts, u, b, a, bias, gain, **_):  # type: ignore[no-untyped-def]
    rows, cols = read_matrix("linear_many", layout).shape
    return 2 * prod(x[:-1]) * rows * (cols + max((shape[1] for shape in b), default=0))


@register_flop_formula(torch.ops.monograph.linear_many_dx)
def _dx_flops(dy, values, scales, layout, starts, du, a, **_):  # type: ignore[no-untyped-def]
    rows, cols = read_matrix("linear_many_dx", layout).shape
    return 2 * prod(dy[:-1]) * cols * (rows + max((shape[0] for shape in a), default=0))
