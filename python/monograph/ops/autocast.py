"""What autocast does to the arguments of an operator, as torch does it to those of its own."""

from __future__ import annotations

from typing import TypeVar

import torch

Argument = TypeVar("Argument", torch.Tensor, torch.Tensor | None)


def cast(tensor: Argument) -> Argument:
    """In the dtype of autocast on the CPU. float64 and integers are left alone, for the operator to name."""
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype("cpu"))
