"""monograph::rms_norm_gated: the root mean square norm of rows, times an activation of a gate.

    y = round(weight round(x k)) act(z)     k = 1 / sqrt(mean(x^2) + eps); Qwen3-Next, Qwen3.5, OLMo-hybrid
    y = weight x k act(z)                   round_before_weight=False: Kimi-Linear

act is silu (gate=0) or sigmoid (gate=1), in float32; y has the dtype of x. Rounded where transformers'
modules round: x k to the dtype of x, the product to the dtype that torch gives weight * x, and the end. A
row's bits depend on nothing but the row. Nothing is saved but the inputs. A second derivative raises. Under
autocast x and z are taken in the wider dtype of the two, and y in that of x.
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
from monograph.ops.rms_norm import check_norm_shapes

GATES = {"silu": 0, "sigmoid": 1}


def rms_norm_gated(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    gate: str = "silu",
    round_before_weight: bool = True,
) -> torch.Tensor:
    """The norm of the rows of x [..., n] times `weight` [n] and the activation of z."""
    if gate not in GATES:
        raise ValueError(f"gate is {gate!r}, wanted one of {', '.join(GATES)}")
    return torch.ops.monograph.rms_norm_gated(x, z, weight, eps, GATES[gate], round_before_weight)


def _check(
    op: str, x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor | None, eps: float, gate: int
) -> None:
    check_tensors(op, x=x, z=z)
    check_optional_tensors(op, x, weight=weight)
    check_rows(op, "x", x)
    check_float(op, "z", z, x.dtype)
    if weight is not None:
        check_float(op, "weight", weight)
    check_norm_shapes(op, x, weight, z=z)
    check_number(op, "eps", eps)
    require(gate in GATES.values(), op, f"gate is {gate}, wanted 0 (silu) or 1 (sigmoid)")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _normed(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, rounded: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the weight multiplies, what the gate multiplies, and 1 / rms; in float32."""
    wide = x.to(_wide(x.dtype))
    factor = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    n = wide * factor
    if rounded:
        n = n.to(x.dtype).to(wide.dtype)
    if weight is None:
        return n, n, factor
    product = weight.to(wide.dtype) * n
    if rounded:
        product = product.to(torch.promote_types(x.dtype, weight.dtype)).to(wide.dtype)
    return n, product, factor


def portable_rms_norm_gated(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    gate: int,
    round_before_weight: bool,
) -> torch.Tensor:
    """The operator in aten operations, for any device; sums in torch's order."""
    _check("rms_norm_gated", x, z, weight, eps, gate)
    _, product, _ = _normed(x, weight, eps, round_before_weight)
    wide = z.to(product.dtype)
    act = torch.nn.functional.silu(wide) if gate == 0 else torch.sigmoid(wide)
    return (product * act).to(x.dtype).contiguous()


def portable_rms_norm_gated_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    gate: int,
    round_before_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients in aten operations: of x, of z, and of the weight (in float32; empty without one)."""
    op = "rms_norm_gated_backward"
    check_tensors(op, x=x, dy=dy)
    _check(op, x, z, weight, eps, gate)
    check_float(op, "dy", dy, x.dtype)
    check_shape(op, "dy", dy, x.shape)
    n, product, factor = _normed(x, weight, eps, round_before_weight)
    wide, gates, d = (t.to(n.dtype) for t in (x, z, dy))
    s = torch.sigmoid(gates)
    act, slope = (gates * s, s + gates * s * (1 - s)) if gate == 0 else (s, s * (1 - s))
    dz = d * product * slope
    d = d * act
    g = d if weight is None else d * weight.to(n.dtype)
    dx = g * factor - wide * ((g * wide).mean(-1, keepdim=True) * factor * factor * factor)
    dweight = n.new_empty(0) if weight is None else (d * n).reshape(-1, x.shape[-1]).sum(0)
    return dx.to(x.dtype).contiguous(), dz.to(x.dtype).contiguous(), dweight


@torch.library.register_fake("monograph::rms_norm_gated")
def _(x, z, weight, eps, gate, round_before_weight):  # type: ignore[no-untyped-def]
    check_tensors("rms_norm_gated", x=x, z=z)
    check_optional_tensors("rms_norm_gated", x, weight=weight)
    check_norm_shapes("rms_norm_gated", x, weight, z=z)
    return x.new_empty(list(x.shape))


@torch.library.register_fake("monograph::rms_norm_gated_backward")
def _(dy, x, z, weight, eps, gate, round_before_weight):  # type: ignore[no-untyped-def]
    op = "rms_norm_gated_backward"
    check_tensors(op, x=x, dy=dy, z=z)
    check_optional_tensors(op, x, weight=weight)
    check_norm_shapes(op, x, weight, dy=dy, z=z)
    dweight = x.new_empty([0 if weight is None else x.shape[-1]], dtype=_wide(x.dtype))
    return x.new_empty(list(x.shape)), x.new_empty(list(x.shape)), dweight


torch.library.impl("monograph::rms_norm_gated", "CompositeExplicitAutograd")(portable_rms_norm_gated)
torch.library.impl("monograph::rms_norm_gated_backward", "CompositeExplicitAutograd")(
    portable_rms_norm_gated_backward
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, z, weight, *ctx.options = inputs
    ctx.save_for_backward(x, z, weight)


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, z, weight = ctx.saved_tensors
    dx, dz, dweight = torch.ops.monograph.rms_norm_gated_backward(dy, x, z, weight, *ctx.options)
    return dx, dz, None if weight is None else dweight.to(weight.dtype), None, None, None


register_autograd("rms_norm_gated", _backward, _setup_context)
register_not_differentiable("rms_norm_gated_backward")


@autocast_rule("rms_norm_gated")
def _autocast(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor | None, *options: Any) -> torch.Tensor:
    wide_x, wide_z = widest(x, z)
    with without_autocast(x):
        return torch.ops.monograph.rms_norm_gated(wide_x, wide_z, weight, *options).to(x.dtype)
