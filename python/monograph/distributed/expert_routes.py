"""ExpertRoutes: which rank owns an expert, and where the slots of a micro-batch go.

Rank r of n owns the experts [r E // n, (r + 1) E // n). A token goes once to each rank that owns one of its
experts, with a list of its slots there; an owner sends back one row for each slot.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


def owned(rank: int, ranks: int, count: int) -> range:
    """The experts of a rank, of `count`."""
    return range(rank * count // ranks, (rank + 1) * count // ranks)


class Part(NamedTuple):
    """What one rank computes of a micro-batch. All int64."""

    tokens: torch.Tensor  # [t] of the micro-batch, each once, in order
    slots: torch.Tensor  # [s] of T k, in order
    rows: torch.Tensor  # [s] for each slot its token's place in `tokens`
    ids: torch.Tensor  # [s] for each slot its expert, counted from the owner's first


class ExpertRoutes(NamedTuple):
    """parts: by rank. places: [T, k], for each slot its row among the rows of all ranks, one rank behind the
    other; -1 for a slot whose expert is none of them."""

    parts: list[Part]
    places: torch.Tensor

    @classmethod
    def of(cls, ids: torch.Tensor, ranks: int, count: int) -> ExpertRoutes:
        flat, chosen = ids.reshape(-1), max(ids.shape[1], 1)
        firsts = torch.tensor([owned(r, ranks, count).start for r in range(ranks)], device=ids.device)
        owner = torch.bucketize(flat, firsts[1:], right=True)
        owner = torch.where((flat < 0) | (flat >= count), ranks, owner)
        slots = torch.sort(owner, stable=True).indices
        sizes = torch.bincount(owner, minlength=ranks + 1).tolist()
        places = torch.full_like(flat, -1)
        inside = slots[: sum(sizes[:ranks])]
        places[inside] = torch.arange(len(inside), device=ids.device)
        parts = []
        for rank, own in enumerate(inside.split(sizes[:ranks])):
            tokens, rows = torch.unique_consecutive(own // chosen, return_inverse=True)
            parts.append(Part(tokens, own, rows, flat[own] - firsts[rank]))
        return cls(parts, places.reshape(ids.shape))
