"""Values that every rank must have alike."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from typing import Any

import torch

from monograph.distributed.world import World


def check_same_values(what: str, tensor: torch.Tensor, wanted: str, world: World) -> None:
    """Raises on every rank, with the first that differs, if a tensor has not the bits of rank 0."""
    if world.size == 1:
        return
    bits: Any = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    hashes = world.gathered(hashlib.sha256(bits).hexdigest())
    other = [rank for rank, found in enumerate(hashes) if found != hashes[0]]
    if other:
        raise ValueError(f"{what} of rank {other[0]} are not those of rank 0; wanted {wanted}")


def fingerprint(tensor: torch.Tensor) -> int:
    """A sum of the bits of a float32 tensor, two numbers at a time: 21 ms of 42 million, where SHA-256 takes
    120; once or twice a step."""
    flat = tensor.detach().reshape(-1)
    even = flat.numel() // 2 * 2
    pairs = flat[:even].view(torch.int64).sum()  # wraps around
    return int(pairs + flat[even:].view(torch.int32).sum())


def check_alike(what: str, values: Sequence[Any]) -> None:
    """Raises, with the value of each rank, if they differ."""
    if len(set(values)) > 1:
        told = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values[:8]))
        raise ValueError(f"the ranks have drifted apart: {what} is {told}; wanted the same on all ranks")


def bits_of(value: float) -> int:
    """A float as a whole number, for a tensor of whole numbers; all NaNs are one."""
    return int(struct.unpack("<q", struct.pack("<d", math.nan if math.isnan(value) else value))[0])


def value_of(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
