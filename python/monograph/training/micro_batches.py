"""The micro-batches of a step: what a model reads of one, and what ranks have to know of each other's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from monograph.distributed import World
from monograph.distributed.same_values import check_alike
from monograph.integrations.torch.collectives import all_gather_into_tensor
from monograph.ops.linear_cross_entropy import IGNORED
from monograph.training.loss import count_targets

# What the models read. The collators' other entries repeat it for flash attention, as numbers that change.
_TENSORS = ("input_ids", "labels", "position_ids", "attention_mask", "cu_seqlens")

Tensors = dict[str, torch.Tensor]


def model_tensors(batch: Mapping[str, Any]) -> Tensors:
    return {name: batch[name] for name in _TENSORS if batch.get(name) is not None}


def with_second_row(tensors: Tensors, usual_rows: int) -> Tensors:
    """One row is a constant to the tracer: where batches usually have more, an epoch's last one gets another,
    without targets. Packed batches (those with cu_seqlens) always have one."""
    if tensors["input_ids"].shape[0] != 1 or usual_rows == 1 or "cu_seqlens" in tensors:
        return tensors
    tensors = {name: tensor.repeat(2, 1) for name, tensor in tensors.items()}
    tensors["labels"][1] = IGNORED
    return tensors


def mark_lengths(tensor: torch.Tensor, mark: Callable[[torch.Tensor, int], None]) -> None:
    """Tells the tracer, with `mark`, which sizes change from batch to batch: all that are no constants to it.

    Sizes 0 and 1 are constants: a packed batch has one row, always.
    """
    for dim, size in enumerate(tensor.shape):
        if size > 1:
            mark(tensor, dim)


@dataclass(frozen=True)
class Taken:
    """batches: those that this rank computes, by their place among all; targets: of all batches of all ranks;
    first_rows: rows of the first of all."""

    batches: dict[int, Tensors]
    targets: int
    first_rows: int


def take(
    batches: Sequence[Mapping[str, Any]],
    own: range,
    world: World,
    alike: Mapping[str, int] | None = None,
    *,
    first_too: bool = False,
) -> Taken:
    """Reads those of `own` alone, and the first one if `first_too`. A collective: a few numbers of each rank.

    alike: what must be the same on all ranks, by name.
    """
    world.doing("collate")
    found = {index: model_tensors(batches[index]) for index in own}
    targets = sum(count_targets(batch) for batch in found.values())
    rows = found[0]["input_ids"].shape[0] if 0 in found else 0
    if world.size > 1:
        alike = {"number of micro-batches": len(batches), **(alike or {})}
        world.doing("count")
        mine = torch.tensor([targets, rows, *alike.values()], device=world.device)
        numbers = all_gather_into_tensor(mine, world.size, world.group).view(world.size, -1)
        for name, values in zip(alike, numbers[:, 2:].T.tolist(), strict=True):
            check_alike(name, values)
        targets, rows = numbers[:, :2].sum(0).tolist()
    if first_too and 0 not in found:
        found[0] = model_tensors(batches[0])
    return Taken(found, targets, rows)
