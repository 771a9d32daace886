"""monograph::linear and monograph::linear_dx: a linear layer straight from packed bytes, and its gradient.

    y  = x W^T + u b^T + bias
    dx = dy W  + du a

W is packed or, with layout [0, 0, rows, cols], plain. The low-rank part rides on the same accumulators, so
LoRA costs no second pass over y or dx. Two ways to use it:

- u is any tensor of its own (dropout in front of it, several adapters side by side): pass u and b; autograd
  gives du = dy b and db = dy^T u, and leaves what lies before u to you.
- u is x a^T: pass a too. Then u counts as a saved intermediate, dx contains du a in the same pass, and a gets
  its gradient du^T x.

Differentiable any number of times; with a frozen `a`, once. No forward mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from monograph.ops import library  # noqa: F401  (the schemas are registered there)
from monograph.ops.argument_checks import (
    check_beside,
    check_float,
    check_low_rank,
    check_rows,
    check_shape,
    check_tensors,
    check_vector,
    check_weight,
    require,
)
from monograph.ops.autocast import autocast_rule, cast, without_autocast
from monograph.ops.autograd import register_autograd
from monograph.ops.dequantize import portable_dequantize
from monograph.ops.gram import gram
from monograph.ops.layout import PLAIN as PLAIN
from monograph.ops.layout import plain_layout, read_matrix

_NARROW = 256


def linear(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: Sequence[torch.Tensor],
    layout: Sequence[int],
    bias: torch.Tensor | None = None,
    u: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    a: torch.Tensor | None = None,
) -> torch.Tensor:
    """x W^T + u b^T + bias in the dtype of x. Most people call `monograph.linear` instead."""
    return torch.ops.monograph.linear(x, values, scales, layout, bias, u, b, a)


def linear_dx(
    dy: torch.Tensor,
    values: torch.Tensor,
    scales: Sequence[torch.Tensor],
    layout: Sequence[int],
    du: torch.Tensor | None = None,
    a: torch.Tensor | None = None,
) -> torch.Tensor:
    """dy W + du a in the dtype of dy: the input gradient of `linear`."""
    return torch.ops.monograph.linear_dx(dy, values, scales, layout, du, a)


def plain_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x weight^T for a small dense weight, by the same kernels: a row's bits do not depend on the batch."""
    return linear(x, weight, [], plain_layout(weight.shape))


def dense_weight(
    values: torch.Tensor, scales: Sequence[torch.Tensor], layout: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """The weight as a matrix of `dtype`, by aten operations."""
    own = read_matrix("linear", layout)
    if own.format == PLAIN:
        return values.reshape(own.shape).to(dtype)
    return portable_dequantize(values, scales, layout, dtype)


def portable_linear(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: Sequence[torch.Tensor],
    layout: Sequence[int],
    bias: torch.Tensor | None = None,
    u: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    a: torch.Tensor | None = None,
) -> torch.Tensor:
    """The operator in aten operations, for any device: dequantises, multiplies, keeps nothing."""
    check_tensors("linear", x=x, values=values, scales=scales, bias=bias, u=u, b=b, a=a)
    rows, cols = check_weight("linear", values, scales, layout)
    check_rows("linear", "x", x, None, cols)
    check_low_rank("linear", x, (rows, cols), u, b, a)
    if bias is not None:
        check_vector("linear", "bias", bias, rows, x.dtype)
    y = torch.nn.functional.linear(x, dense_weight(values, scales, layout, x.dtype), bias)
    if u is None or b is None:
        return y
    return y + torch.nn.functional.linear(u, b.to(x.dtype))


def portable_linear_dx(
    dy: torch.Tensor,
    values: torch.Tensor,
    scales: Sequence[torch.Tensor],
    layout: Sequence[int],
    du: torch.Tensor | None = None,
    a: torch.Tensor | None = None,
) -> torch.Tensor:
    """The input gradient in aten operations, for any device."""
    check_tensors("linear_dx", dy=dy, values=values, scales=scales, du=du, a=a)
    rows, cols = check_weight("linear_dx", values, scales, layout)
    check_rows("linear_dx", "dy", dy, None, rows)
    require((du is None) == (a is None), "linear_dx", "du and a must come together")
    dx = dy @ dense_weight(values, scales, layout, dy.dtype)
    if du is None or a is None:
        return dx
    check_beside("linear_dx", "du", du, dy)
    check_float("linear_dx", "a", a)
    check_shape("linear_dx", "a", a, (du.shape[-1], cols))
    return dx + du @ a.to(dy.dtype)


def check_linear_layout(op: str, what: str, x: torch.Tensor, layout: Sequence[int]) -> tuple[int, ...]:
    """For fakes: rows and columns of the weight. A width that is known while tracing must fit, so that a
    graph names what is wrong; an unknown one is the kernel's to check."""
    require(x.dim() >= 1, op, f"{what} has no dimensions, wanted [..., cols]")
    rows, cols = shape = read_matrix(op, layout).shape
    width = x.shape[-1]
    if isinstance(width, int) and what == "x":
        require(width == cols, op, f"x has {width} columns, the weight has {cols}")
    elif isinstance(width, int):
        require(width == rows, op, f"{what} has {width} columns, the weight has {rows} rows")
    return shape


@torch.library.register_fake("monograph::linear")
def _(x, values, scales, layout, bias, u, b, a):  # type: ignore[no-untyped-def]
    check_tensors("linear", x=x, values=values, scales=scales, bias=bias, u=u, b=b, a=a)
    rows, _ = check_linear_layout("linear", "x", x, layout)
    return x.new_empty([*x.shape[:-1], rows])


@torch.library.register_fake("monograph::linear_dx")
def _(dy, values, scales, layout, du, a):  # type: ignore[no-untyped-def]
    check_tensors("linear_dx", dy=dy, values=values, scales=scales, du=du, a=a)
    _, cols = check_linear_layout("linear_dx", "dy", dy, layout)
    return dy.new_empty([*dy.shape[:-1], cols])


torch.library.impl("monograph::linear", "CompositeExplicitAutograd")(portable_linear)
torch.library.impl("monograph::linear_dx", "CompositeExplicitAutograd")(portable_linear_dx)


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """All leading dimensions as one."""
    return tensor.reshape(-1, tensor.shape[-1])


def gradient_of_plain(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """dy^T x for a plain weight: by `gram` where one side is narrow, as a factor of LoRA with dropout is."""
    if min(dy.shape[-1], x.shape[-1]) <= _NARROW:
        return gram(dy, x, dtype=weight.dtype).reshape(weight.shape)
    return (as_rows(dy).t() @ as_rows(x)).to(weight.dtype).reshape(weight.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, values, scales, layout, bias, u, b, a = inputs
    # x itself is needed only for the gradient of a dense matrix it multiplies.
    needs_x = (a is not None and a.requires_grad) or values.requires_grad
    ctx.save_for_backward(x if needs_x else None, values, *scales, u, b, a)
    ctx.layout = layout
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, values, *scales, u, b, a = ctx.saved_tensors
    needs = ctx.needs_input_grad
    if a is not None and needs[6] and (needs[0] or needs[7]) and torch.is_grad_enabled():
        # db = dy^T u: a second derivative wants u as the product that it is; the saved one hangs on nothing.
        if x is None:
            raise RuntimeError(
                "linear: no second derivative with a frozen `a`; pass u alone, as a tensor of its own"
            )
        u = plain_linear(x, a.to(x.dtype))
    dx = dvalues = dbias = du = db = da = None
    low = b is not None and (needs[5] or (a is not None and (needs[0] or needs[7])))
    if low:
        du = linear_dx(dy, b.to(dy.dtype).contiguous(), [], plain_layout(b.shape))
    if needs[0]:
        fused = a is not None and du is not None
        dx = linear_dx(
            dy, values, scales, ctx.layout, du if fused else None, a.to(dy.dtype) if fused else None
        )
    if needs[1]:
        dvalues = gradient_of_plain(dy, x, values)
    if needs[4]:
        dbias = as_rows(dy).sum(0).to(ctx.bias_dtype)
    if needs[6]:
        db = gram(dy, u, dtype=b.dtype)
    if needs[7]:
        assert du is not None
        da = gram(du, x, dtype=a.dtype)
    # With `a`, u is a saved intermediate and gets no gradient of its own.
    return dx, dvalues, [None] * len(scales), None, dbias, du if a is None else None, db, da


register_autograd("linear", _backward, _setup_context)


def _dx_setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    dy, values, scales, layout, du, a = inputs
    trained = a is not None and a.requires_grad
    ctx.save_for_backward(dy if values.requires_grad else None, values, *scales, du if trained else None, a)
    ctx.layout = layout


def _dx_backward(ctx: Any, ddx: torch.Tensor) -> tuple[Any, ...]:
    """dx is linear in dy and du, and its transpose is the forward: double backward comes for free."""
    dy, values, *scales, du, a = ctx.saved_tensors
    needs = ctx.needs_input_grad
    ddy = dvalues = ddu = da = None
    if needs[0]:
        ddy = linear(ddx, values, scales, ctx.layout)
    if needs[1]:
        dvalues = gradient_of_plain(dy, ddx, values)
    if needs[4]:
        ddu = plain_linear(ddx, a)
    if needs[5]:
        da = gram(du, ddx, dtype=a.dtype)
    return ddy, dvalues, [None] * len(scales), None, ddu, da


register_autograd("linear_dx", _dx_backward, _dx_setup_context)


@autocast_rule("linear")
def _autocast(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: Sequence[torch.Tensor],
    layout: Sequence[int],
    bias: torch.Tensor | None = None,
    u: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    a: torch.Tensor | None = None,
) -> torch.Tensor:
    x, bias, u, b, a = cast(x), *(cast(t) for t in (bias, u, b, a))
    with without_autocast(x):
        return torch.ops.monograph.linear(x, values, scales, layout, bias, u, b, a)


@register_flop_formula(torch.ops.monograph.linear)
def _linear_flops(x, values, scales, layout, bias=None, u=None, b=None, a=None, **_):  # type: ignore[no-untyped-def]
    rank = 0 if u is None else u[-1]
    rows, cols = read_matrix("linear", layout).shape
    return 2 * prod(x[:-1]) * rows * (cols + rank)


@register_flop_formula(torch.ops.monograph.linear_dx)
def _linear_dx_flops(dy, values, scales, layout, du=None, a=None, **_):  # type: ignore[no-untyped-def]
    rank = 0 if du is None else du[-1]
    rows, cols = read_matrix("linear_dx", layout).shape
    return 2 * prod(dy[:-1]) * cols * (rows + rank)
