"""monograph::linear_shared and monograph::linear_shared_dx: several weights on one x (q, k, v; gate, up).

    y_i = x W_i^T + u_i b_i^T + bias_i
    dx  = sum_i (dy_i W_i + du_i a_i)

x is packed once for all weights, and its gradient is one pass instead of a sum of several tensors. bias, u, b
and a are empty or have one entry per weight; with `a`, u_i is x a_i^T, as in `monograph.ops.linear`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from monograph.ops import library  # noqa: F401  (the schemas are registered there)
from monograph.ops.argument_checks import check_beside, check_tensors, require
from monograph.ops.autocast import autocast_rule, cast, without_autocast
from monograph.ops.autograd import register_autograd
from monograph.ops.gram import gram
from monograph.ops.layout import join_layouts, plain_layout, read_matrix, split_layouts
from monograph.ops.linear import (
    as_rows,
    gradient_of_plain,
    linear,
    linear_dx,
    plain_linear,
    portable_linear,
    portable_linear_dx,
)

Tensors = Sequence[torch.Tensor]


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
    """One output per weight. `scales[i]` and `layouts[i]` are those that `linear` takes for weight i."""
    flat = [scale for own in scales for scale in own]
    numbers = join_layouts(layouts, [len(own) for own in scales])
    lists = (list(part) for part in (bias, u, b, a))
    return torch.ops.monograph.linear_shared(x, list(values), flat, numbers, *lists)


def _check_counts(op: str, layouts: Sequence[int], lists: dict[str, Tensors], left: str, right: str) -> None:
    """`left` and `right` are the names of the two factors of low rank."""
    n = len(lists["values"])
    split_layouts(op, layouts, n)
    for name, given in lists.items():
        if name not in ("values", "scales"):
            fits = len(given) == n or (len(given) == 0 and name != "dy")
            require(fits, op, f"{name} has {len(given)} entries, wanted {'' if name == 'dy' else '0 or '}{n}")
    counts = len(lists[left]), len(lists[right])
    require(
        counts[0] == counts[1],
        op,
        f"{left} has {counts[0]} entries, {right} has {counts[1]}; they must come together",
    )
    require(bool(lists[left]) or not lists["a"], op, "a is given without u and b, wanted all three")


def _check_scales(op: str, values: Tensors, scales: Tensors, layouts: Sequence[int]) -> None:
    counts = [count for _, count in split_layouts(op, layouts, len(values))]
    fits = min(counts) >= 0 and sum(counts) == len(scales)
    require(fits, op, f"layouts claims {counts} scales, {len(scales)} are given")


def _shapes(op: str, values: Tensors, layouts: Sequence[int]) -> list[tuple[int, ...]]:
    """(rows, cols) of each weight."""
    return [read_matrix(op, layout).shape for layout, _ in split_layouts(op, layouts, len(values))]


def _weights(
    values: Tensors, scales: Tensors, layouts: Sequence[int]
) -> list[tuple[torch.Tensor, Tensors, Sequence[int]]]:
    """(values, scales, layout) of each weight; `layouts` was checked."""
    own = split_layouts("linear_shared", layouts, len(values))
    ends = list(accumulate(count for _, count in own))
    return [
        (value, scales[end - count : end], layout)
        for value, (layout, count), end in zip(values, own, ends, strict=True)
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
    lists = {"values": values, "scales": scales, "bias": bias, "u": u, "b": b, "a": a}
    check_tensors("linear_shared", x=x, **lists)
    _check_counts("linear_shared", layouts, lists, "u", "b")
    _check_scales("linear_shared", values, scales, layouts)
    outputs = []
    for i, weight in enumerate(_weights(values, scales, layouts)):
        own_bias = bias[i] if bias else None
        low = (u[i], b[i], a[i] if a else None) if u else (None, None)
        outputs.append(portable_linear(x, *weight, own_bias, *low))
    return outputs


def portable_linear_shared_dx(
    dy: Tensors, values: Tensors, scales: Tensors, layouts: Sequence[int], du: Tensors, a: Tensors
) -> torch.Tensor:
    """The input gradient in aten operations, for any device."""
    lists = {"values": values, "scales": scales, "dy": dy, "du": du, "a": a}
    check_tensors("linear_shared_dx", **lists)
    _check_counts("linear_shared_dx", layouts, lists, "du", "a")
    _check_scales("linear_shared_dx", values, scales, layouts)
    cols = {shape[1] for shape in _shapes("linear_shared_dx", values, layouts)}
    require(len(cols) == 1, "linear_shared_dx", f"the weights have {sorted(cols)} columns, wanted one number")
    parts = []
    for i, weight in enumerate(_weights(values, scales, layouts)):
        low = (du[i], a[i]) if du else (None, None)
        parts.append(portable_linear_dx(dy[i], *weight, *low))
    for g in dy:
        check_beside("linear_shared_dx", "dy", g, dy[0])
    return torch.stack(parts).sum(0)


@torch.library.register_fake("monograph::linear_shared")
def _(x, values, scales, layouts, bias, u, b, a):  # type: ignore[no-untyped-def]
    lists = {"values": values, "scales": scales, "bias": bias, "u": u, "b": b, "a": a}
    check_tensors("linear_shared", x=x, **lists)
    _check_counts("linear_shared", layouts, lists, "u", "b")
    require(x.dim() >= 1, "linear_shared", "x has no dimensions, wanted [..., cols]")
    return [x.new_empty([*x.shape[:-1], rows]) for rows, _ in _shapes("linear_shared", values, layouts)]


@torch.library.register_fake("monograph::linear_shared_dx")
def _(dy, values, scales, layouts, du, a):  # type: ignore[no-untyped-def]
    lists = {"values": values, "scales": scales, "dy": dy, "du": du, "a": a}
    check_tensors("linear_shared_dx", **lists)
    _check_counts("linear_shared_dx", layouts, lists, "du", "a")
    require(dy[0].dim() >= 1, "linear_shared_dx", "dy has no dimensions, wanted [..., cols]")
    _, cols = _shapes("linear_shared_dx", values, layouts)[0]
    return dy[0].new_empty([*dy[0].shape[:-1], cols])


torch.library.impl("monograph::linear_shared", "CompositeExplicitAutograd")(portable_linear_shared)
torch.library.impl("monograph::linear_shared_dx", "CompositeExplicitAutograd")(portable_linear_shared_dx)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, values, scales, layouts, bias, u, b, a = inputs
    trained = a or any(value.requires_grad for value in values)
    ctx.save_for_backward(x if trained else None, *values, *scales, *u, *b, *a)
    ctx.layouts = layouts
    ctx.counts = [len(part) for part in (values, scales, u, b, a)]
    ctx.bias_count = len(bias)


def _backward(ctx: Any, dy: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    x, *rest = ctx.saved_tensors
    ends = list(accumulate(ctx.counts))
    values, scales, u, b, a = (rest[end - count : end] for end, count in zip(ends, ctx.counts, strict=True))
    dy = list(dy)
    if a and torch.is_grad_enabled():
        # A second derivative wants u as the product that it is; the saved ones hang on nothing.
        u = [plain_linear(x, m.to(x.dtype)) for m in a]
    du = [
        linear_dx(g, m.to(g.dtype).contiguous(), [], plain_layout(m.shape))
        for g, m in zip(dy, b, strict=False)
    ]
    dx = None
    if ctx.needs_input_grad[0]:
        low = (du, [m.to(dy[0].dtype) for m in a]) if a else ([], [])
        dx = torch.ops.monograph.linear_shared_dx(dy, values, scales, ctx.layouts, *low)
    dbias = [as_rows(g).sum(0) for g in dy[: ctx.bias_count]]
    db = [gram(g, low, dtype=m.dtype) for g, low, m in zip(dy, u, b, strict=False)]
    da = [gram(g, x, dtype=m.dtype) for g, m in zip(du, a, strict=False)]
    dvalues = [
        gradient_of_plain(g, x, value) if needed else None
        for g, value, needed in zip(dy, values, ctx.needs_input_grad[1], strict=True)
    ]
    # With `a`, u is a saved intermediate and gets no gradient of its own.
    return dx, dvalues, [None] * len(scales), None, dbias, [None] * len(u) if a else du, db, da


register_autograd("linear_shared", _backward, _setup_context)


def _dx_setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    dy, values, scales, layouts, du, a = inputs
    ctx.save_for_backward(*dy, *values, *scales, *du, *a)
    ctx.layouts = layouts
    ctx.counts = [len(part) for part in (dy, values, scales, du, a)]


def _dx_backward(ctx: Any, ddx: torch.Tensor) -> tuple[Any, ...]:
    """dx is a sum of products, and the transpose of each is a forward."""
    ends = list(accumulate(ctx.counts))
    saved = ctx.saved_tensors  # read once: checkpointing gives them out once
    dy, values, scales, du, a = (
        saved[end - count : end] for end, count in zip(ends, ctx.counts, strict=True)
    )
    needs = ctx.needs_input_grad
    ddy = [linear(ddx, *weight) for weight in _weights(values, scales, ctx.layouts)]
    dvalues = [
        gradient_of_plain(g, ddx, value) if needed else None
        for g, value, needed in zip(dy, values, needs[1], strict=True)
    ]
    ddu = [plain_linear(ddx, m) for m in a]
    da = [gram(low, ddx, dtype=m.dtype) for low, m in zip(du, a, strict=True)]
    return ddy, dvalues, [None] * len(scales), None, ddu, da


register_autograd("linear_shared_dx", _dx_backward, _dx_setup_context)


@autocast_rule("linear_shared")
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
    x = cast(x)
    bias, u, b, a = ([cast(t) for t in part] for part in (bias, u, b, a))
    with without_autocast(x):
        return torch.ops.monograph.linear_shared(x, values, scales, layouts, bias, u, b, a)


@register_flop_formula(torch.ops.monograph.linear_shared)
def _linear_shared_flops(x, values, scales, layouts, bias, u, b, a, **_):  # type: ignore[no-untyped-def]
    shapes = _shapes("linear_shared", values, layouts)
    ranks = [shape[-1] for shape in u] or [0] * len(shapes)
    return 2 * prod(x[:-1]) * sum(n * (k + r) for (n, k), r in zip(shapes, ranks, strict=True))


@register_flop_formula(torch.ops.monograph.linear_shared_dx)
def _linear_shared_dx_flops(dy, values, scales, layouts, du, a, **_):  # type: ignore[no-untyped-def]
    ranks = sum(shape[-1] for shape in du)
    shapes = _shapes("linear_shared_dx", values, layouts)
    return 2 * prod(dy[0][:-1]) * shapes[0][1] * (sum(rows for rows, _ in shapes) + ranks)
