"""monograph::experts and its gradients: a layer of experts straight from packed bytes, as one operator.

    pre_s = W1_e x_t + scale1 B1_e A1_e x_t + bias1_e          slot s = t k + j goes to expert e = ids[t, j]
    d_s   = W2_e h_s + scale2 B2_e A2_e h_s + bias2_e          h_s = activation(pre_s)
    y_t   = sum_j weights[t, j] d_s

Slots are computed sorted by expert, in the order of tokens within one; those with ids outside [0, E) are
skipped, give zero and get zero gradients. `pre` [T k, 2I] comes sorted and is what backward keeps; with
save=False it has no rows and backward computes it again. `ExpertsArguments` names every argument; the factors
lie as PEFT's `target_parameters` has them.

pre, h, d, the low-rank u and du and the gradient of pre are rounded to the dtype of x, everything else is
summed in float32 and rounded once. A second derivative raises, and so does forward mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from monograph.ops import library  # noqa: F401  (the schemas are registered there)
from monograph.ops.argument_checks import require
from monograph.ops.autocast import autocast_rule, cast, without_autocast
from monograph.ops.autograd import register_autograd, register_not_differentiable
from monograph.ops.experts_arguments import (
    Activation,
    ExpertsArguments,
    check_fake,
    flat_layer,
    two_stacks,
)
from monograph.ops.experts_portable import gradients, portable_experts
from monograph.ops.providers import serve

__all__ = ["Activation", "experts", "portable_experts", "two_stacks"]

_NEED = 6  # x, weights, bias1, bias2, (a1, b1), (a2, b2)


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    first: tuple[torch.Tensor, Sequence[torch.Tensor], Sequence[int]],
    second: tuple[torch.Tensor, Sequence[torch.Tensor], Sequence[int]],
    *,
    bias: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    lora1: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    lora2: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    activation: Activation = Activation.SILU,
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    transposed: bool = False,
    save: bool = True,
) -> torch.Tensor:
    """y [T, H] in the dtype of x. A weight is (values, scales, layout) and a LoRA (a, b, scale). `first`
    may be `two_stacks(gate, up)`, with the bits of one stack of both."""
    layer = flat_layer(first, second, bias, lora1, lora2)
    numbers = (int(activation), interleaved, float(alpha), float(limit), transposed, save)
    y, _ = torch.ops.monograph.experts(x, ids, weights, *layer, *numbers)
    return y


def portable_experts_backward(
    dy: torch.Tensor, pre: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, ...]:
    """The gradients in aten operations, for any device."""
    *rest, need = arguments
    given = ExpertsArguments(*rest)
    _check_need(need)
    found = gradients("experts_backward", dy, pre, given, dense=False)
    slots = given.slots
    dx = given.x.new_zeros(given.x.shape, dtype=found.dx.dtype)
    for j in range(given.ids.shape[1]):  # in the order of slots
        dx = dx + found.dx[:slots].reshape(*given.ids.shape, found.first.cols)[:, j]
    dweights = found.dweights[:slots].reshape(given.ids.shape)
    pairs = zip(found.a, found.b, strict=True)
    (da1, db1), (da2, db2) = ((a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)) for a, b in pairs)
    made = (dx, dweights, *found.bias, da1, db1, da2, db2)
    wanted = _wanted(given, need)
    return tuple(
        given.x.new_empty(0) if like is None else one.to(like.dtype).contiguous()
        for one, like in zip(made, wanted, strict=True)
    )


def portable_experts_dw(
    dy: torch.Tensor, pre: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of plain weights in aten operations, for any device."""
    given = ExpertsArguments(*arguments)
    plain = not given.scales1 and not given.scales2
    require(plain, "experts_dw", "the weights are packed, wanted plain ones")
    found = gradients("experts_dw", dy, pre, given, dense=True)
    first, second = (
        (d.transpose(1, 2) if given.transposed else d).to(values.dtype).reshape(values.shape).contiguous()
        for d, values in zip(found.dense, (given.values1, given.values2), strict=True)
    )
    return first, second


def _check_need(need: Sequence[bool]) -> None:
    require(len(need) == _NEED, "experts_backward", f"need has {len(need)} entries, wanted {_NEED}")


def _wanted(given: ExpertsArguments, need: Sequence[bool]) -> list[torch.Tensor | None]:
    """For each output what it is the gradient of; None where it stays empty."""
    single = (given.x, given.weights, given.bias1, given.bias2)
    pairs = (given.a1, given.b1, given.a2, given.b2)
    flags = (*need[:4], need[4], need[4], need[5], need[5])
    return [t if flag else None for t, flag in zip((*single, *pairs), flags, strict=True)]


@torch.library.register_fake("monograph::experts")
def _(*arguments):  # type: ignore[no-untyped-def]
    *rest, save = arguments
    given = ExpertsArguments(*rest)
    check_fake("experts", given)
    (_, rows, hidden), _ = given.shapes("experts")
    rows, hidden = (hidden, rows) if given.transposed else (rows, hidden)
    pre = given.x.new_empty([given.slots if save else 0, rows])
    return given.x.new_empty([given.x.shape[0], hidden]), pre


@torch.library.register_fake("monograph::experts_backward")
def _(dy, pre, *arguments):  # type: ignore[no-untyped-def]
    *rest, need = arguments
    given = ExpertsArguments(*rest)
    check_fake("experts_backward", given, dy=dy, pre=pre)
    _check_need(need)
    return tuple(
        given.x.new_empty(0) if t is None else t.new_empty(list(t.shape)) for t in _wanted(given, need)
    )


@torch.library.register_fake("monograph::experts_dw")
def _(dy, pre, *arguments):  # type: ignore[no-untyped-def]
    given = ExpertsArguments(*arguments)
    check_fake("experts_dw", given, dy=dy, pre=pre)
    return tuple(t.new_empty(list(t.shape)) for t in (given.values1, given.values2))


torch.library.impl("monograph::experts", "CompositeExplicitAutograd")(serve("experts", portable_experts))
torch.library.impl("monograph::experts_backward", "CompositeExplicitAutograd")(
    serve("experts_backward", portable_experts_backward)
)
torch.library.impl("monograph::experts_dw", "CompositeExplicitAutograd")(
    serve("experts_dw", portable_experts_dw)
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    given = ExpertsArguments(*inputs[:-1])
    tensors = (given.bias1, given.bias2, given.a1, given.b1, given.a2, given.b2)
    routes = (given.x, given.ids, given.weights)
    ctx.save_for_backward(
        output[1], *routes, *tensors, given.values1, given.values2, *given.scales1, *given.scales2
    )
    ctx.count = len(given.scales1)
    ctx.layouts = given.layout1, given.layout2
    ctx.numbers = given[15:]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # zeros as large as pre otherwise


def _saved(ctx: Any) -> tuple[torch.Tensor, ExpertsArguments]:
    pre, x, ids, weights, bias1, bias2, a1, b1, a2, b2, values1, values2, *scales = ctx.saved_tensors
    layout1, layout2 = ctx.layouts
    first = (values1, scales[: ctx.count], layout1, bias1)
    second = (values2, scales[ctx.count :], layout2, bias2)
    return pre, ExpertsArguments(x, ids, weights, *first, *second, a1, b1, a2, b2, *ctx.numbers)


def _backward(ctx: Any, dy: torch.Tensor | None, _: Any) -> tuple[Any, ...]:
    pre, given = _saved(ctx)
    if dy is None:
        dy = torch.zeros_like(given.x)
    needs = ctx.needs_input_grad
    flags = [needs[0], needs[2], needs[6], needs[10], needs[11] or needs[12], needs[13] or needs[14]]
    found: list[torch.Tensor | None] = [None] * 8
    if any(flags):
        made = torch.ops.monograph.experts_backward(dy, pre, *given, flags)
        found = [t if like is not None else None for t, like in zip(made, _wanted(given, flags), strict=True)]
    dvalues1 = dvalues2 = None
    if needs[3] or needs[7]:
        dvalues1, dvalues2 = torch.ops.monograph.experts_dw(dy, pre, *given)
    dx, dweights, dbias1, dbias2, da1, db1, da2, db2 = found
    none1, none2 = [None] * len(given.scales1), [None] * len(given.scales2)
    first = (dvalues1 if needs[3] else None, none1, None, dbias1)
    second = (dvalues2 if needs[7] else None, none2, None, dbias2)
    return dx, None, dweights, *first, *second, da1, db1, da2, db2, *[None] * 8


register_autograd("experts", _backward, _setup_context)
register_not_differentiable("experts_backward")
register_not_differentiable("experts_dw")


@autocast_rule("experts")
def _autocast(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *rest: Any) -> Any:
    """x is cast as torch casts the input of a product; biases and factors may have any dtype."""
    x = cast(x)
    weights = weights if weights.dtype in (x.dtype, torch.float64) else weights.float()
    with without_autocast(x):
        return torch.ops.monograph.experts(x, ids, weights, *rest)


def _products(arguments: Sequence[Any]) -> tuple[int, int, int]:
    """Multiplications of all slots in the first weight, in the second, and for each rank in their factors.
    Shapes stand for tensors, and all slots count: how many are skipped is not known."""
    given = ExpertsArguments(*arguments)
    tokens, k = arguments[1]
    (count, rows, cols), (_, hidden, inner) = given.shapes("experts")
    slots, low = tokens * k, 0
    for a, sizes in ((arguments[11], rows + cols), (arguments[13], hidden + inner)):
        low += 0 if a is None else slots * sizes * (a[0] // max(count, 1))
    return slots * rows * cols, slots * hidden * inner, low


@register_flop_formula(torch.ops.monograph.experts)
def _flops(*arguments, out_shape=None, **_):  # type: ignore[no-untyped-def]
    return 2 * sum(_products(arguments[:-1]))


@register_flop_formula(torch.ops.monograph.experts_backward)
def _backward_flops(dy, pre, *arguments, out_shape=None, **_):  # type: ignore[no-untyped-def]
    """Both input gradients; of the factors the same and twice as much for their own gradients."""
    first, second, low = _products(arguments[:-1])
    again = first if pre[0] == 0 else 0
    return 2 * (first + second + 3 * low + again)


@register_flop_formula(torch.ops.monograph.experts_dw)
def _dw_flops(dy, pre, *arguments, out_shape=None, **_):  # type: ignore[no-untyped-def]
    return 2 * sum(_products(arguments)[:2])
