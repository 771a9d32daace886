"""monograph::silu_mul and gelu_mul: the middle of a gated MLP, f(gate) * up.

f(gate) is rounded to the dtype of the activations, as transformers' modules round. gate and up may be halves
of one tensor. Nothing is saved but the two. A second derivative raises. Under autocast both are taken in the
wider dtype of the two.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from monograph.ops import library  # noqa: F401  (the schemas are registered there)
from monograph.ops.argument_checks import check_float, check_rows, check_shape, check_tensors
from monograph.ops.autocast import autocast_rule, widest, without_autocast
from monograph.ops.autograd import register_autograd, register_not_differentiable


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    return torch.ops.monograph.silu_mul(gate, up)


def gelu_mul(gate: torch.Tensor, up: torch.Tensor, *, tanh: bool) -> torch.Tensor:
    """gelu(gate) * up, with the tanh approximation (Gemma's) or exact."""
    return torch.ops.monograph.gelu_mul(gate, up, tanh)


def _check(op: str, gate: torch.Tensor, **others: torch.Tensor) -> None:
    check_tensors(op, gate=gate, **others)
    check_rows(op, "gate", gate)
    for what, t in others.items():
        check_float(op, what, t, gate.dtype)
        check_shape(op, what, t, gate.shape)


def _gelu(tanh: bool) -> str:
    return "tanh" if tanh else "none"


def portable_silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The operator in aten operations, for any device."""
    _check("silu_mul", gate, up=up)
    return (F.silu(gate) * up).contiguous()


def portable_gelu_mul(gate: torch.Tensor, up: torch.Tensor, tanh: bool) -> torch.Tensor:
    """The operator in aten operations, for any device."""
    _check("gelu_mul", gate, up=up)
    return (F.gelu(gate, approximate=_gelu(tanh)) * up).contiguous()


def portable_silu_mul_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients in aten operations; dy * up is rounded before the slope."""
    _check("silu_mul_backward", gate, up=up, dy=dy)
    dgate = torch.ops.aten.silu_backward(dy * up, gate)
    return dgate.contiguous(), (dy * F.silu(gate)).contiguous()


def portable_gelu_mul_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, tanh: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients in aten operations; dy * up is rounded before the slope."""
    _check("gelu_mul_backward", gate, up=up, dy=dy)
    dgate = torch.ops.aten.gelu_backward(dy * up, gate, approximate=_gelu(tanh))
    return dgate.contiguous(), (dy * F.gelu(gate, approximate=_gelu(tanh))).contiguous()


@torch.library.register_fake("monograph::silu_mul")
def _(gate, up):  # type: ignore[no-untyped-def]
    check_tensors("silu_mul", gate=gate, up=up)
    return gate.new_empty(list(gate.shape))


@torch.library.register_fake("monograph::gelu_mul")
def _(gate, up, tanh):  # type: ignore[no-untyped-def]
    check_tensors("gelu_mul", gate=gate, up=up)
    return gate.new_empty(list(gate.shape))


@torch.library.register_fake("monograph::silu_mul_backward")
def _(dy, gate, up):  # type: ignore[no-untyped-def]
    check_tensors("silu_mul_backward", gate=gate, up=up, dy=dy)
    return gate.new_empty(list(gate.shape)), gate.new_empty(list(gate.shape))


@torch.library.register_fake("monograph::gelu_mul_backward")
def _(dy, gate, up, tanh):  # type: ignore[no-untyped-def]
    check_tensors("gelu_mul_backward", gate=gate, up=up, dy=dy)
    return gate.new_empty(list(gate.shape)), gate.new_empty(list(gate.shape))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    gate, up, *ctx.options = inputs
    ctx.save_for_backward(gate, up)


def _silu_backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.monograph.silu_mul_backward(dy, *ctx.saved_tensors)


def _gelu_backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    return (*torch.ops.monograph.gelu_mul_backward(dy, *ctx.saved_tensors, *ctx.options), None)


for _name, _portable, _formula in (
    ("silu_mul", (portable_silu_mul, portable_silu_mul_backward), _silu_backward),
    ("gelu_mul", (portable_gelu_mul, portable_gelu_mul_backward), _gelu_backward),
):
    torch.library.impl(f"monograph::{_name}", "CompositeExplicitAutograd")(_portable[0])
    torch.library.impl(f"monograph::{_name}_backward", "CompositeExplicitAutograd")(_portable[1])
    register_autograd(_name, _formula, _setup_context)
    register_not_differentiable(f"{_name}_backward")


@autocast_rule("silu_mul")
def _silu_autocast(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    cast = widest(gate, up)
    with without_autocast(gate):
        return torch.ops.monograph.silu_mul(*cast)


@autocast_rule("gelu_mul")
def _gelu_autocast(gate: torch.Tensor, up: torch.Tensor, tanh: bool) -> torch.Tensor:
    cast = widest(gate, up)
    with without_autocast(gate):
        return torch.ops.monograph.gelu_mul(*cast, tanh)
