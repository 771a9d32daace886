"""The packed values of a stack whose experts are spread over ranks, in order, on the first of them."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

from monograph.distributed.expert_adapter import group_of_layer
from monograph.distributed.expert_routes import owned
from monograph.nn.packed_experts import PackedExperts
from monograph.quant.stack_pair import StackPair


def values_in_order(layer: PackedExperts, name: str) -> Iterator[torch.Tensor]:
    """Bytes of each rank's experts, uint8, rank by rank; on other ranks than the first nothing is given. A
    collective: all of it is to be read."""
    group = group_of_layer(layer)
    share = layer.expert_share
    assert share is not None
    own = _own_values(layer, name)
    each = own.numel() // share.held
    if group.rank:
        group.swap(0, [own], 0, [])
        return
    yield own
    for rank in range(1, group.size):
        part = own.new_empty(each * len(owned(rank, group.size, share.count)))
        group.swap(rank, [], rank, [part])
        yield part


def _own_values(layer: PackedExperts, name: str) -> torch.Tensor:
    """Of this rank's experts alone: where blocks run on, stored values may begin before them."""
    held = layer.held(name)
    if isinstance(held, StackPair):
        raise ValueError(f"{name}: gate and up are two stacks, wanted one")
    values = held.values.reshape(-1).view(torch.uint8)
    if not held.origin:
        return values
    first, count = held.origin * held.format.bits, prod(held.shape) * held.format.bits
    if first % 8 or count % 8:
        raise ValueError(f"{name}: an expert of {held!r} begins inside a byte, wanted whole bytes")
    return values[first // 8 : (first + count) // 8]
