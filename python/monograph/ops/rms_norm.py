"""monograph::rms_norm: the root mean square norm of rows, with the residual stream added before it.

    s = x + residual            rounded to the dtype of x; the next residual stream
    y = round(s k) weight       k = 1 / sqrt(mean(s^2) + eps); Llama, Qwen, Mistral
    y = round(s k (1 + weight)) Gemma: one_plus_weight=True, round_before_weight=False

Rounded where transformers' modules round. y has the dtype that torch gives s * weight, that of x if there is
one rounding. A row's bits depend on nothing but the row. Nothing is saved but s and the weight. A second
derivative raises. Under autocast x and residual are taken in the wider dtype of the two.
"""

from __future__ import annotations

from typing import Any

import torch

from monograph.ops import library  # noqa: F401  (the schemas are registered there)
from monograph.ops.argument_checks import (
    check_float,
    check_number,
    check_optional_tensors,
    check_rows,
    check_shape,
    check_tensors,
    require,
)
from monograph.ops.autocast import autocast_rule, widest, without_autocast
from monograph.ops.autograd import register_autograd, register_not_differentiable


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    one_plus_weight: bool = False,
    round_before_weight: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual, and that sum; without a residual the norm of x, and x itself."""
    y, s = torch.ops.monograph.rms_norm(x, weight, residual, eps, one_plus_weight, round_before_weight)
    return y, x if residual is None else s


def _type_of_y(x: torch.Tensor, weight: torch.Tensor | None, round_before_weight: bool) -> torch.dtype:
    if weight is None or not round_before_weight:
        return x.dtype
    return torch.promote_types(x.dtype, weight.dtype)


def check_norm_shapes(
    op: str, x: torch.Tensor, weight: torch.Tensor | None, **like_x: torch.Tensor | None
) -> None:
    """What a trace has to know: a gradient has the shape of its input."""
    require(x.dim() >= 1, op, "x has no dimensions, wanted [..., cols]")
    if weight is not None:
        check_shape(op, "weight", weight, [x.shape[-1]])
    for what, t in like_x.items():
        if t is not None:
            check_shape(op, what, t, x.shape)


def _check(
    op: str, x: torch.Tensor, weight: torch.Tensor | None, eps: float, **like_x: torch.Tensor | None
) -> None:
    check_rows(op, "x", x)
    if weight is not None:
        check_float(op, "weight", weight)
    check_number(op, "eps", eps)
    for what, t in like_x.items():
        if t is not None:
            check_float(op, what, t, x.dtype)
    check_norm_shapes(op, x, weight, **like_x)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _gain(weight: torch.Tensor | None, wide: torch.dtype, one_plus_weight: bool) -> torch.Tensor | float:
    if weight is None:
        return 1.0
    return 1.0 + weight.to(wide) if one_plus_weight else weight.to(wide)


def _normed(s: torch.Tensor, eps: float, rounded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What the weight multiplies, in float32, and 1 / rms."""
    wide = s.to(_wide(s.dtype))
    factor = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    n = wide * factor
    return (n.to(s.dtype).to(wide.dtype) if rounded else n), factor


def normed_rows(
    s: torch.Tensor, weight: torch.Tensor | None, eps: float, one_plus_weight: bool, round_before_weight: bool
) -> torch.Tensor:
    """The norm in aten operations, without checks."""
    n, _ = _normed(s, eps, round_before_weight)
    return (n * _gain(weight, n.dtype, one_plus_weight)).to(_type_of_y(s, weight, round_before_weight))


def norm_gradient(
    dy: torch.Tensor,
    s: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    one_plus_weight: bool,
    round_before_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of s, and the terms whose sum over rows is that of the weight; both in float32."""
    n, factor = _normed(s, eps, round_before_weight)
    wide, d = s.to(n.dtype), dy.to(n.dtype)
    g = d * _gain(weight, n.dtype, one_plus_weight)
    along = (g * wide).mean(-1, keepdim=True) * factor * factor * factor
    return g * factor - wide * along, d * n


def portable_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    one_plus_weight: bool,
    round_before_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator in aten operations, for any device; sums in torch's order."""
    check_optional_tensors("rms_norm", x, weight=weight, residual=residual)
    _check("rms_norm", x, weight, eps, residual=residual)
    s = x if residual is None else x + residual
    y = normed_rows(s, weight, eps, one_plus_weight, round_before_weight)
    return y.contiguous(), x.new_empty(0) if residual is None else s.contiguous()


def portable_rms_norm_backward(
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    one_plus_weight: bool,
    round_before_weight: bool,
    need_dweight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients in aten operations: of x (the sum, if there was a residual) and of the weight."""
    op = "rms_norm_backward"
    check_tensors(op, x=x, dy=dy)
    check_optional_tensors(op, x, dsum=dsum, weight=weight)
    _check(op, x, weight, eps, dsum=dsum)
    check_float(op, "dy", dy, _type_of_y(x, weight, round_before_weight))
    check_shape(op, "dy", dy, x.shape)
    require(weight is not None or not need_dweight, op, "need_dweight is true, but weight is None")
    dx, terms = norm_gradient(dy, x, weight, eps, one_plus_weight, round_before_weight)
    dx = (dx if dsum is None else dx + dsum).to(x.dtype)
    dweight = terms.reshape(-1, x.shape[-1]).sum(0) if need_dweight else terms.new_empty(0)
    return dx.contiguous(), dweight


@torch.library.register_fake("monograph::rms_norm")
def _(x, weight, residual, eps, one_plus_weight, round_before_weight):  # type: ignore[no-untyped-def]
    check_optional_tensors("rms_norm", x, weight=weight, residual=residual)
    check_norm_shapes("rms_norm", x, weight, residual=residual)
    y = x.new_empty(list(x.shape), dtype=_type_of_y(x, weight, round_before_weight))
    return y, x.new_empty([0] if residual is None else list(x.shape))


@torch.library.register_fake("monograph::rms_norm_backward")
def _(dy, dsum, x, weight, eps, one_plus, round_before, need_dweight):  # type: ignore[no-untyped-def]
    op = "rms_norm_backward"
    check_tensors(op, x=x, dy=dy)
    check_optional_tensors(op, x, dsum=dsum, weight=weight)
    check_norm_shapes(op, x, weight, dy=dy, dsum=dsum)
    size = x.shape[-1] if need_dweight else 0
    return x.new_empty(list(x.shape)), x.new_empty([size], dtype=_wide(x.dtype))


torch.library.impl("monograph::rms_norm", "CompositeExplicitAutograd")(portable_rms_norm)
torch.library.impl("monograph::rms_norm_backward", "CompositeExplicitAutograd")(portable_rms_norm_backward)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, weight, residual, *ctx.options = inputs
    ctx.save_for_backward(x if residual is None else output[1], weight)
    ctx.with_residual = residual is not None
    if residual is None:
        ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dy: torch.Tensor, dsum: torch.Tensor) -> tuple[Any, ...]:
    s, weight = ctx.saved_tensors
    dx, dweight = torch.ops.monograph.rms_norm_backward(
        dy, dsum if ctx.with_residual else None, s, weight, *ctx.options, ctx.needs_input_grad[1]
    )
    dweight = dweight.to(weight.dtype) if ctx.needs_input_grad[1] else None
    return dx, dweight, dx if ctx.with_residual else None, None, None, None


register_autograd("rms_norm", _backward, _setup_context)
register_not_differentiable("rms_norm_backward")


@autocast_rule("rms_norm")
def _autocast(
    x: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor | None, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    x, residual = widest(x, residual)  # type: ignore[assignment]
    with without_autocast(x):
        return torch.ops.monograph.rms_norm(x, weight, residual, *options)
