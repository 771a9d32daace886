"""How the operators enter autograd: what a formula does not give is refused by name, never silently zero.

torch.library.register_autograd drops the tangents of forward-mode differentiation (torch.func.jvp), and an
operator without a formula only warns when it is differentiated. The registrations here raise in both cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from monograph.ops import library  # noqa: F401  (the schemas are registered there)
from monograph.upstream.torch_names import (
    autograd_info,
    in_forward_mode,
    make_autograd_impl,
    transforms_active,
)

_REGISTRATIONS = torch.library.Library("monograph", "FRAGMENT")


def _refuse_tangents(name: str, arguments: tuple[Any, ...]) -> None:
    for argument in arguments:
        for t in argument if isinstance(argument, (list, tuple)) else (argument,):
            if isinstance(t, torch.Tensor) and torch.autograd.forward_ad.unpack_dual(t).tangent is not None:
                raise NotImplementedError(
                    f"{name}: forward-mode differentiation (torch.func.jvp) is not supported; wanted backward"
                )


def _refuse_transforms(name: str, arguments: tuple[Any, ...]) -> None:
    for argument in arguments:
        for t in argument if isinstance(argument, (list, tuple)) else (argument,):
            if isinstance(t, torch.Tensor) and t.requires_grad:
                raise NotImplementedError(
                    f"{name}: gradients by torch.func (grad, vjp, jacrev) are not supported; wanted "
                    "torch.autograd.grad or backward()"
                )


def register_autograd(
    name: str, backward: Callable[..., Any], setup_context: Callable[..., None] | None = None
) -> None:
    """torch.library.register_autograd for monograph::name, without forward mode."""
    kernel = make_autograd_impl(
        getattr(torch.ops.monograph, name).default, autograd_info(backward, setup_context)
    )

    def checked(keyset: Any, *arguments: Any, **keywords: Any) -> Any:
        if in_forward_mode():
            _refuse_tangents(name, arguments)
        if transforms_active() and torch.is_grad_enabled():
            _refuse_transforms(name, arguments)
        return kernel(keyset, *arguments, **keywords)

    _REGISTRATIONS.impl(name, checked, "Autograd", with_keyset=True)


def register_not_differentiable(name: str) -> None:
    """For an operator that is itself a gradient: a second derivative through it raises."""

    def backward(ctx: Any, *_: Any) -> None:
        raise RuntimeError(f"{name} is a gradient and cannot be differentiated again: no second derivative")

    register_autograd(name, backward)


def register_without_gradient(name: str, instead: str) -> None:
    """For an operator inside others, whose gradients those have: a derivative through it raises."""

    def backward(ctx: Any, *_: Any) -> None:
        raise RuntimeError(f"{name} has no gradient: {instead}")

    register_autograd(name, backward)


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.name = name
        return torch.empty(0, device=inputs[0].device if inputs else None)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(f"{ctx.name} cannot be differentiated twice: it has no second derivative")


def anchor(name: str, *inputs: torch.Tensor | None) -> torch.Tensor:
    """An empty tensor that depends on the inputs and keeps none of them: what `once` hangs gradients on."""
    with torch.enable_grad():
        return _Anchor.apply(name, *(t for t in inputs if t is not None))


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.new_zeros(0), gradient


def once(anchor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient that a formula returns; to differentiate it by the anchor's inputs raises."""
    return _Once.apply(anchor, gradient) if torch.is_grad_enabled() else gradient
