"""What autocast does to the arguments of an operator, as torch does it to those of its own."""

from __future__ import annotations

import functools
from typing import TypeVar

import torch

_CAST = (torch.bfloat16, torch.float16, torch.float32)

Argument = TypeVar("Argument", torch.Tensor, torch.Tensor | None)


def cast(tensor: Argument) -> Argument:
    """In the dtype of autocast on the CPU. float64 and integers are left alone, for the operator to name."""
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype("cpu"))


def widest(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """All in the widest dtype among them, as torch's elementwise operations compute under autocast.

    Left alone if one is float64 or no float, for the operator to name.
    """
    found = [t.dtype for t in tensors if t is not None]
    if any(dtype not in _CAST for dtype in found):
        return list(tensors)
    wide = functools.reduce(torch.promote_types, found)
    return [t if t is None else t.to(wide) for t in tensors]
