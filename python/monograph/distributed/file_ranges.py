"""The bytes that one rank holds of a unit, out of its whole tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from monograph.distributed.layer_bytes import Layout


def read_range(tensors: Mapping[str, torch.Tensor], layout: Layout, rank: int) -> torch.Tensor:
    """The shard of `rank`: uint8 [layout.bytes_per_rank], a new tensor."""
    shard = torch.zeros(layout.bytes_per_rank, dtype=torch.uint8)
    for piece, begin, end, place in layout.parts(rank):
        own = tensors[piece.name].detach().contiguous().reshape(-1).view(torch.uint8)
        shard[place : place + end - begin] = own[begin:end]
    return shard
