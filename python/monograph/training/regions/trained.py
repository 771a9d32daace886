"""The trained parameters of a layer as the region operator takes them: one by one, or sliced from one tensor.

A layer with LoRA on seven matrices has 14 parameters. As one slice of the flat tensor of all (FlatParameters)
they are one input of the outer graph, one gradient and one guard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True)
class Layout:
    """For each tensor that the operator gets: the parameters in it, by name, shape and dtype.

    sliced: whether the tensors are float32 slices with several parameters behind each other; else each is the
    parameter itself. times: for each slice, of factors of spread experts, how many rows it has, one for each
    rank whose tokens they serve; 0 for a slice without rows. Shapes begin with that number.
    """

    parts: tuple[tuple[tuple[str, tuple[int, ...], torch.dtype], ...], ...]
    sliced: bool
    times: tuple[int, ...] = ()

    def shapes(self) -> list[tuple[int, ...]]:
        """Of the slices."""
        found: list[tuple[int, ...]] = []
        for part, times in zip(self.parts, self.times, strict=True):
            size = sum(prod(shape) for _, shape, _ in part)
            found.append((times, size // times) if times else (size,))
        return found

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for part in self.parts for name, _, _ in part)

    def parameters(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The parameters by name, as differentiable parts of `tensors`, in their own dtypes."""
        found: dict[str, torch.Tensor] = {}
        for part, tensor in zip(self.parts, tensors, strict=True):
            if not self.sliced:
                found[part[0][0]] = tensor
                continue
            rows = tensor.shape[0] if tensor.dim() == 2 else 1
            pieces = tensor.split([prod(shape) // rows for _, shape, _ in part], -1)
            for (name, shape, dtype), piece in zip(part, pieces, strict=True):
                found[name] = piece.view(shape).to(dtype)
        return found


_LAYOUTS: list[Layout] = []
_NUMBERS: dict[Layout, int] = {}


def number_of(layout: Layout) -> str:
    """The word by which the operator's arguments name a layout: a string is a constant to the tracer."""
    if layout not in _NUMBERS:
        _NUMBERS[layout] = len(_LAYOUTS)
        _LAYOUTS.append(layout)
    return str(_NUMBERS[layout])


def layout_of(number: str) -> Layout:
    return _LAYOUTS[int(number)]


def one_by_one(parameters: dict[str, torch.Tensor]) -> Layout:
    return Layout(tuple(((name, tuple(p.shape), p.dtype),) for name, p in parameters.items()), sliced=False)
