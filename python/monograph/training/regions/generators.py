"""Generators of random numbers: Python's, NumPy's, torch's, and those that objects hold."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from monograph.training.regions.held import HeldState


def generators_of_all() -> list[HeldState]:
    """Those that every module can draw from."""
    found = [
        HeldState("Python's generator (random)", random.getstate, random.setstate),
        HeldState("torch's generator", torch.get_rng_state, torch.set_rng_state),
    ]
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        found.append(HeldState("NumPy's generator", numpy.random.get_state, numpy.random.set_state))
    return found


def generator(value: Any, label: str) -> HeldState | None:
    """A generator that somebody holds; None for anything else."""
    if isinstance(value, random.SystemRandom):
        return None  # without a state; it asks the system
    if isinstance(value, random.Random):
        return HeldState(f"the generator {label}", value.getstate, value.setstate)
    if isinstance(value, torch.Generator):
        return HeldState(f"the generator {label}", value.get_state, value.set_state)
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.random.RandomState):
        return HeldState(f"the generator {label}", value.get_state, value.set_state)
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return HeldState(
            f"the generator {label}", lambda: bits.state, lambda state: setattr(bits, "state", state)
        )
    return None
