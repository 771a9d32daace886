"""What autocast does to the arguments of an operator, as torch does it to those of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from monograph.ops import library  # noqa: F401  (the schemas are registered there)

# One rule for all devices: what torch calls autocast on each.
_KEYS = ("AutocastCPU", "AutocastCUDA", "AutocastXPU", "AutocastMPS", "AutocastPrivateUse1")
_CAST = (torch.bfloat16, torch.float16, torch.float32)

Argument = TypeVar("Argument", torch.Tensor, torch.Tensor | None)
Rule = TypeVar("Rule", bound=Callable[..., Any])


def autocast_rule(name: str) -> Callable[[Rule], Rule]:
    """Registers what monograph::name does under autocast, on every device."""

    def register(rule: Rule) -> Rule:
        for key in _KEYS:
            torch.library.impl(f"monograph::{name}", key)(rule)
        return rule

    return register


def without_autocast(tensor: torch.Tensor) -> torch.amp.autocast:
    """Inside, autocast is off on the device of a tensor."""
    return torch.amp.autocast(tensor.device.type, enabled=False)


def cast(tensor: Argument) -> Argument:
    """In the dtype of autocast on its device. float64 and integers are left for the operator to name."""
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def widest(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """All in the widest dtype among them, as torch's elementwise operations compute under autocast.

    Left alone if one is float64 or no float, for the operator to name.
    """
    found = [t.dtype for t in tensors if t is not None]
    if any(dtype not in _CAST for dtype in found):
        return list(tensors)
    wide = functools.reduce(torch.promote_types, found)
    return [t if t is None else t.to(wide) for t in tensors]
