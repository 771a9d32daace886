"""monograph::linear_scaled: a linear layer with LoRA and a gain for each output, DoRA's.

    y = gain (x W^T + u b^T),  u = x a^T

The gain is float32 and meets the float32 sums before the only rounding: in bf16 a gain of 1.003 is 1, and a
product that is rounded already stays where it is. u is a saved intermediate, as in `linear` with `a`; W is
frozen. The gradient of the gain comes from y / gain, so nothing but y is kept for it: for a gain of exactly 0
it is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from monograph.ops import library  # noqa: F401  (the schemas are registered there)
from monograph.ops.argument_checks import (
    check_low_rank,
    check_rows,
    check_tensors,
    check_vector,
    check_weight,
    require,
)
from monograph.ops.autocast import autocast_rule, cast, without_autocast
from monograph.ops.autograd import register_autograd
from monograph.ops.gain_backward import gain_backward
from monograph.ops.gram import gram
from monograph.ops.layout import plain_layout, read_matrix
from monograph.ops.linear import (
    as_rows,
    check_linear_layout,
    dense_weight,
    linear,
    linear_dx,
    plain_linear,
)


def linear_scaled(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: Sequence[torch.Tensor],
    layout: Sequence[int],
    gain: torch.Tensor,
    u: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
) -> torch.Tensor:
    """gain (x W^T + u b^T) in the dtype of x; u must be x a^T."""
    return torch.ops.monograph.linear_scaled(x, values, scales, layout, gain, u, b, a)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What a gain is stored in, and products meet it in."""
    return torch.promote_types(dtype, torch.float32)


def portable_linear_scaled(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: Sequence[torch.Tensor],
    layout: Sequence[int],
    gain: torch.Tensor,
    u: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
) -> torch.Tensor:
    """The operator in aten operations, for any device; the two products are rounded before the gain."""
    op = "linear_scaled"
    check_tensors(op, x=x, values=values, scales=scales, gain=gain, u=u, b=b, a=a)
    require(a is not None and u is not None and b is not None, op, "u, b and a are wanted, found None")
    rows, cols = check_weight(op, values, scales, layout)
    check_rows(op, "x", x, None, cols)
    check_low_rank(op, x, (rows, cols), u, b, a)
    wide = _wide(x.dtype)
    check_vector(op, "gain", gain, rows, wide)
    product = torch.nn.functional.linear(x, dense_weight(values, scales, layout, x.dtype))
    low = torch.nn.functional.linear(u, b.to(x.dtype))
    return (gain * (product.to(wide) + low)).to(x.dtype)


torch.library.impl("monograph::linear_scaled", "CompositeExplicitAutograd")(portable_linear_scaled)


@torch.library.register_fake("monograph::linear_scaled")
def _(x, values, scales, layout, gain, u, b, a):  # type: ignore[no-untyped-def]
    check_tensors("linear_scaled", x=x, values=values, scales=scales, gain=gain, u=u, b=b, a=a)
    rows, _ = check_linear_layout("linear_scaled", "x", x, layout)
    return x.new_empty([*x.shape[:-1], rows])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, values, scales, layout, gain, u, b, a = inputs
    if values.requires_grad:
        raise ValueError("linear_scaled: the weight requires a gradient, wanted a frozen one")
    y = output if gain.requires_grad else None
    ctx.save_for_backward(x if a.requires_grad else None, values, *scales, gain, u, b, a, y)
    ctx.layout = layout


def _of_gain(
    dy: torch.Tensor, y: torch.Tensor | None, gain: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """dz = dy * gain and the gradient of the gain. Written out where a compiler fuses it or somebody
    differentiates it again."""
    if not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
        dz, dgain = gain_backward(dy, y, gain)
        return dz, None if y is None else dgain
    dz = (dy * gain).to(dy.dtype)
    if y is None:
        return dz, None
    return dz, (as_rows(dy).to(gain.dtype) * as_rows(y)).sum(0) / gain


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, values, *scales, gain, u, b, a, y = ctx.saved_tensors
    needs = ctx.needs_input_grad
    dx = db = da = None
    product = None  # what the gain multiplies
    if torch.is_grad_enabled():
        # A second derivative wants u and the product as what they are; those saved hang on nothing.
        if x is None:
            raise RuntimeError("linear_scaled: no second derivative with a frozen `a`, wanted a trained one")
        u = plain_linear(x, a.to(x.dtype))
        product = linear(x, values, scales, ctx.layout, None, u, b, a)
    dz, dgain = _of_gain(dy, y if needs[4] and product is None else None, gain)
    if needs[4] and product is not None:
        dgain = (as_rows(dy).to(gain.dtype) * as_rows(product)).sum(0)
    du = linear_dx(dz, b.to(dy.dtype).contiguous(), [], plain_layout(b.shape))
    if needs[0]:
        dx = linear_dx(dz, values, scales, ctx.layout, du, a.to(dy.dtype))
    if needs[6]:
        db = gram(dz, u, dtype=b.dtype)
    if needs[7]:
        da = gram(du, x, dtype=a.dtype)
    return dx, None, [None] * len(scales), None, dgain, None, db, da


register_autograd("linear_scaled", _backward, _setup_context)


@autocast_rule("linear_scaled")
def _autocast(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: Sequence[torch.Tensor],
    layout: Sequence[int],
    gain: torch.Tensor,
    u: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
) -> torch.Tensor:
    x, u, b, a = (cast(t) for t in (x, u, b, a))
    with without_autocast(x):
        return torch.ops.monograph.linear_scaled(x, values, scales, layout, gain, u, b, a)


@register_flop_formula(torch.ops.monograph.linear_scaled)
def _flops(x, values, scales, layout, gain, u, b, a, **_):  # type: ignore[no-untyped-def]
    rows, cols = read_matrix("linear_scaled", layout).shape
    return 2 * prod(x[:-1]) * rows * (cols + u[-1])
