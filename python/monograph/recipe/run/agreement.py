"""After every step the ranks compare what they got and put together what each has counted.

One small all_gather a step. It carries a signal that any of them was sent, so that all end after the same
step, and it notices ranks that have drifted apart, which no collective would.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from monograph.distributed.replica_check import bits_of, check_alike, value_of
from monograph.distributed.world import World
from monograph.upstream.collectives import all_gather_into_tensor


@dataclass(frozen=True)
class Own:
    """What one rank knows after a step. parameters: their fingerprint; memory: the most so far, in KiB."""

    step: int
    loss: float
    grad_norm: float
    parameters: int
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


def agree(world: World, own: Own) -> Agreed:
    """The same on all ranks. Raises if they are at different steps, or loss, norm or parameters differ."""
    if world.size == 1:
        return Agreed(own.signal, own.tokens, own.computed, own.memory, own.memory)
    world.doing("check")
    numbers = (own.step, bits_of(own.loss), bits_of(own.grad_norm), own.parameters)
    given = [*numbers, own.signal, own.tokens, own.computed, own.memory]
    mine = torch.tensor(given, device=world.device)
    rows = all_gather_into_tensor(mine, world.size, world.group).view(world.size, -1)
    step, loss, norm, parameters = rows[:, :4].T.tolist()
    check_alike("step", step)
    check_alike(f"loss of step {own.step}", [value_of(bits).hex() for bits in loss])
    check_alike(f"grad_norm of step {own.step}", [value_of(bits).hex() for bits in norm])
    check_alike(f"sum of the trained parameters (bits) after step {own.step}", parameters)
    signals, tokens, computed, memory = rows[:, 4:].unbind(1)
    return Agreed(
        int(signals.max()), int(tokens.sum()), int(computed.sum()), int(memory.max()), int(memory.sum())
    )
