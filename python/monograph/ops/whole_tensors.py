"""Packed bytes that torch has sharded across ranks: operators read whole tensors and refuse parts by name."""

from __future__ import annotations

import sys
from typing import Any

import torch


def is_part(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, outside of graphs. Its module is imported by whoever makes one, not here."""
    if torch.compiler.is_compiling():
        return False
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def described_part(tensor: Any) -> str:
    mesh = tensor.device_mesh
    return f"a DTensor of shape {list(tensor.shape)} over {mesh.size()} ranks"


def require_whole(op: str, tensor: torch.Tensor) -> None:
    if is_part(tensor):
        raise ValueError(
            f"{op}: the packed bytes are {described_part(tensor)}, wanted whole ones. Call `unshard()` of "
            "the layer that fully_shard has sharded before, and `reshard()` after; `monograph merge` merges "
            "an adapter from its files"
        )
