"""Gate and up of experts as two stacks of their own, as a GGUF file has them: one weight of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from monograph.ops.experts_arguments import Weight, two_stacks
from monograph.ops.formats import BlockShape
from monograph.quant.packed_weight import PackedWeight


@dataclass(frozen=True, eq=False)
class StackPair:
    """[E, I, H] each, in any two formats; together they are the [E, 2I, H] of `gate_up_proj`: gate in front
    of up or, in one format of ggml's blocks, their rows in turns."""

    gate: PackedWeight
    up: PackedWeight
    alternate: bool = False  # row 2i is of gate, 2i + 1 of up

    def __post_init__(self) -> None:
        if self.gate.shape != self.up.shape:
            raise ValueError(f"gate has shape {self.gate.shape}, up {self.up.shape}, wanted both alike")
        kinds = self.gate.format, self.up.format
        if self.alternate and (kinds[0] is not kinds[1] or kinds[0].shape is not BlockShape.INTERLEAVED):
            found = f"gate is {kinds[0].name}, up {kinds[1].name}, and their rows alternate"
            raise ValueError(f"{found}; wanted one format of ggml's blocks")

    @property
    def shape(self) -> tuple[int, ...]:
        experts, rows, cols = self.gate.shape
        return experts, 2 * rows, cols

    @property
    def nbytes(self) -> int:
        return self.gate.nbytes + self.up.nbytes

    @property
    def device(self) -> torch.device:
        return self.gate.device

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        parts = [self.gate.dequantize(dtype), self.up.dequantize(dtype)]
        return torch.stack(parts, 2).flatten(1, 2) if self.alternate else torch.cat(parts, dim=1)

    def slice_experts(self, first: int, count: int) -> StackPair:
        gate, up = (part.slice_experts(first, count) for part in (self.gate, self.up))
        return replace(self, gate=gate, up=up)


Stack = PackedWeight | StackPair


def stacks_of(stack: Stack) -> tuple[PackedWeight, ...]:
    """One, or gate and up."""
    return (stack.gate, stack.up) if isinstance(stack, StackPair) else (stack,)


def each_stack(stack: Stack, change: Callable[[PackedWeight], PackedWeight]) -> Stack:
    """The same weight of changed stacks."""
    parts = [change(part) for part in stacks_of(stack)]
    return replace(stack, gate=parts[0], up=parts[1]) if isinstance(stack, StackPair) else parts[0]


def as_dtype(stack: Stack, dtype: torch.dtype) -> Stack:
    return each_stack(stack, lambda part: replace(part, dtype=dtype))


def tensors_of(stack: Stack) -> list[torch.Tensor]:
    """What is stored, in the order of `part_names`."""
    return [tensor for part in stacks_of(stack) for tensor in (part.values, *part.scales)]


def with_tensors(stack: Stack, tensors: Sequence[torch.Tensor]) -> Stack:
    rest: Iterator[torch.Tensor] = iter(tensors)
    return each_stack(
        stack, lambda part: replace(part, values=next(rest), scales=tuple(next(rest) for _ in part.scales))
    )


def part_names(stack: Stack, name: str) -> list[str]:
    """Of the parameters that hold the stored tensors of the weight `name`."""
    fronts = ("gate_", "up_") if isinstance(stack, StackPair) else ("",)
    return [
        f"{name}_{front}{part}"
        for front, own in zip(fronts, stacks_of(stack), strict=True)
        for part in ("values", *own.format.scale_names[: len(own.scales)])
    ]


def as_argument(stack: Stack, tensors: Sequence[torch.Tensor]) -> Weight:
    """(values, scales, layout) of `experts`, on the tensors that are stored now."""
    made = with_tensors(stack, tensors)
    weights = [(part.values, list(part.scales), part.layout) for part in stacks_of(made)]
    return weights[0] if len(weights) == 1 else two_stacks(*weights)
