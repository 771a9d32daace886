"""After every step the ranks compare what they got and put together what each has counted.

One small all_gather a step. It carries a signal that any of them was sent, so that all end after the same
step, and it notices ranks that have drifted apart, which no collective would.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch

from monograph.distributed.world import World
from monograph.integrations.torch.collectives import all_gather_into_tensor


@dataclass(frozen=True)
class Own:
    """What one rank knows after a step. memory: the most it has had, in KiB."""

    step: int
    loss: float
    grad_norm: float
    signal: int
    tokens: int
    computed: int
    memory: int


@dataclass(frozen=True)
class Agreed:
    """signal: one that any rank was sent, 0 if none was; memory: of the rank that had the most, in KiB."""

    signal: int
    tokens: int
    computed: int
    memory: int
    memory_of_all: int


def _bits(value: float) -> int:
    if math.isnan(value):
        value = math.nan  # one of many
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _value(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


def agree(world: World, own: Own) -> Agreed:
    """The same on all ranks. Raises if they are at different steps or have different losses or norms."""
    if world.size == 1:
        return Agreed(own.signal, own.tokens, own.computed, own.memory, own.memory)
    world.doing("check")
    numbers = (own.step, _bits(own.loss), _bits(own.grad_norm))
    mine = torch.tensor([*numbers, own.signal, own.tokens, own.computed, own.memory])
    rows = all_gather_into_tensor(mine, world.size, world.group).view(world.size, -1)
    for column, name in enumerate(("step", "loss", "grad_norm")):
        found = rows[:, column].tolist()
        if len(set(found)) > 1:
            values = found if name == "step" else [_value(bits).hex() for bits in found]
            told = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            raise ValueError(f"the ranks have drifted apart: {name} of step {own.step} is {told}")
    signals, tokens, computed, memory = rows[:, 3:].unbind(1)
    return Agreed(
        int(signals.max()), int(tokens.sum()), int(computed.sum()), int(memory.max()), int(memory.sum())
    )
