"""monograph::experts_slots and its gradients: a list of slots, computed where their experts are.

    d_s  = what `experts` has for a slot of token rows[s] at expert ids[s]: [S, H], neither weighted nor
    summed dx_s = the slot's part of dx, for the dy of its token and its routing weight: [S, H]

Both are rounded to the dtype of x where `experts` rounds them, so that `combine_slots` over them, wherever
they were computed, gives the bits of one `experts`. The other gradients are those of `experts` for these
slots: sums over them in their order. An id or a row outside is an error: a slot that is skipped would look
like one whose result is zero. Backward computes `pre` again; nothing is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from monograph.ops import library  # noqa: F401  (the schemas are registered there)
from monograph.ops.argument_checks import check_shape, check_tensors, dtype_name, require, require_on_device
from monograph.ops.autograd import register_not_differentiable, register_without_gradient
from monograph.ops.experts_arguments import ExpertsArguments, check_experts, check_fake

_NEED = 6  # x, weights, bias1, bias2, (a1, b1), (a2, b2)


def _as_experts(
    op: str,
    x: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    rest: Sequence[Any],
) -> ExpertsArguments:
    """The same slots as tokens of `experts`, each with a row of x of its own."""
    check_tensors(op, x=x, rows=rows, ids=ids)
    require(x.dim() == 2, op, f"x has {x.dim()} dimensions, wanted 2")
    for name, t in (("ids", ids), ("rows", rows)):
        require(t.dim() == 1, op, f"{name} has {t.dim()} dimensions, wanted 1")
        require(t.dtype == torch.int64, op, f"{name} has dtype {dtype_name(t.dtype)}, wanted int64")
    check_shape(op, "rows", rows, list(ids.shape))
    if weights is not None:
        check_tensors(op, x=x, weights=weights)
        check_shape(op, "weights", weights, list(ids.shape))
    inside = ((rows >= 0) & (rows < x.shape[0])).all()
    require_on_device(inside, op, f"rows has a number outside 0 to {x.shape[0] - 1}")
    routed = x.new_ones(ids.shape[0], 1) if weights is None else weights[:, None]
    given = ExpertsArguments(x.index_select(0, rows), ids[:, None], routed, *rest)
    count, _, _ = check_experts(op, given)
    require_on_device(((ids >= 0) & (ids < count)).all(), op, f"ids has a number outside 0 to {count - 1}")
    return given


def portable_experts_slots(
    x: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, *rest: Any
) -> torch.Tensor:
    """By `experts`, which may have a kernel of its own on the device."""
    given = _as_experts("experts_slots", x, rows, ids, None, rest)
    y, _ = torch.ops.monograph.experts(*given, False)
    return y


def portable_experts_slots_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *arguments: Any,
) -> tuple[torch.Tensor, ...]:
    op = "experts_slots_backward"
    *rest, need = arguments
    require(len(need) == _NEED, op, f"need has {len(need)} entries, wanted {_NEED}")
    given = _as_experts(op, x, rows, ids, weights, rest)
    check_tensors(op, x=x, dy=dy)
    require(dy.dtype == x.dtype, op, f"dy is {dtype_name(dy.dtype)}, wanted {dtype_name(x.dtype)} as x")
    check_shape(op, "dy", dy, list(x.shape))
    pre = x.new_empty(0, given.shapes(op)[0][2 if given.transposed else 1])
    dx, dweights, *others = torch.ops.monograph.experts_backward(dy.index_select(0, rows), pre, *given, need)
    return dx, dweights.reshape(-1), *others


@torch.library.register_fake("monograph::experts_slots")
def _(x, rows, ids, *rest):  # type: ignore[no-untyped-def]
    _check_fake("experts_slots", x, rows, ids, None, rest)
    return x.new_empty([ids.shape[0], x.shape[1]])


@torch.library.register_fake("monograph::experts_slots_backward")
def _(dy, x, rows, ids, weights, *arguments):  # type: ignore[no-untyped-def]
    op = "experts_slots_backward"
    *rest, need = arguments
    require(len(need) == _NEED, op, f"need has {len(need)} entries, wanted {_NEED}")
    given = _check_fake(op, x, rows, ids, weights, rest, dy=dy)
    single = (None, weights, given.bias1, given.bias2)
    pairs = (given.a1, given.b1, given.a2, given.b2)
    flags = (need[0], *need[1:4], need[4], need[4], need[5], need[5])
    found = [
        t.new_empty(list(t.shape)) if flag and t is not None else x.new_empty(0)
        for t, flag in zip((*single, *pairs), flags, strict=True)
    ]
    if need[0]:
        found[0] = x.new_empty([ids.shape[0], x.shape[1]])
    return tuple(found)


def _check_fake(
    op: str,
    x: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    rest: Sequence[Any],
    **more: torch.Tensor,
) -> ExpertsArguments:
    for name, t in (("rows", rows), ("ids", ids), ("weights", weights)):
        if t is not None:
            check_tensors(op, x=x, **{name: t})
            require(t.dim() == 1, op, f"{name} has {t.dim()} dimensions, wanted 1")
    given = ExpertsArguments(x, ids[:, None], (ids if weights is None else weights)[:, None], *rest)
    check_fake(op, given, **more)
    return given


torch.library.impl("monograph::experts_slots", "CompositeExplicitAutograd")(portable_experts_slots)
torch.library.impl("monograph::experts_slots_backward", "CompositeExplicitAutograd")(
    portable_experts_slots_backward
)
register_without_gradient("experts_slots", "wanted experts_slots_backward, called with it")
register_not_differentiable("experts_slots_backward")


def _products(x: Sequence[int], slots: int, rest: Sequence[Any]) -> tuple[int, int, int]:
    """As of `experts`: multiplications in the first weight, in the second, and in their factors."""
    given = ExpertsArguments(x, (slots, 1), (slots, 1), *rest)  # type: ignore[arg-type]
    (count, rows, cols), (_, hidden, inner) = given.shapes("experts_slots")
    low = 0
    for a, sizes in ((given.a1, rows + cols), (given.a2, hidden + inner)):
        low += 0 if a is None else slots * sizes * (int(a[0]) // max(count, 1))
    return slots * rows * cols, slots * hidden * inner, low


@register_flop_formula(torch.ops.monograph.experts_slots)
def _flops(x, rows, ids, *rest, out_shape=None, **_):  # type: ignore[no-untyped-def]
    return 2 * sum(_products(x, ids[0], rest))


@register_flop_formula(torch.ops.monograph.experts_slots_backward)
def _backward_flops(dy, x, rows, ids, weights, *arguments, out_shape=None, **_):  # type: ignore[no-untyped-def]
    first, second, low = _products(x, ids[0], arguments[:-1])
    return 2 * (2 * first + second + 3 * low)
