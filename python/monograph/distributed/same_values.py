"""Values that every rank must have alike."""

from __future__ import annotations

import hashlib
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
