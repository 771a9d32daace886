"""The micro-batches of a step: what a model reads of one, and what ranks have to know of each other's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch

from monograph.distributed import World
from monograph.distributed.replica_check import check_alike
from monograph.ops.linear_cross_entropy import IGNORED
from monograph.training.batch_keys import DOCUMENTS, KNOWN, Tensors
from monograph.training.loss import count_targets
from monograph.upstream.collectives import all_gather_into_tensor

Read = Callable[[Mapping[str, Any], str], Tensors]


def with_second_row(tensors: Tensors, usual_rows: int) -> Tensors:
    """One row is a constant to the tracer: where batches usually have more, an epoch's last one gets another,
    without targets. Packed batches (those with cu_seqlens) always have one, and what images lie in may not
    lie by rows: such a batch is traced for itself."""
    alone = tensors["input_ids"].shape[0] == 1 and usual_rows > 1
    if not alone or DOCUMENTS in tensors or not tensors.keys() <= set(KNOWN):
        return tensors
    tensors = {name: _twice(name, tensor) for name, tensor in tensors.items()}
    for name in ("labels", "shift_labels"):
        if name in tensors:
            tensors[name][1] = IGNORED
    return tensors


def _twice(name: str, tensor: torch.Tensor) -> torch.Tensor:
    of_three = name == "position_ids" and tensor.dim() == 3  # rotary positions [3, rows, tokens]
    return torch.cat((tensor, tensor), dim=1 if of_three else 0)


def mark_lengths(tensor: torch.Tensor, mark: Callable[[torch.Tensor, int], None]) -> None:
    """Tells the tracer, with `mark`, which sizes change from batch to batch: all that are no constants to it.

    Sizes 0 and 1 are constants: a packed batch has one row, always.
    """
    for dim, size in enumerate(tensor.shape):
        if size > 1:
            mark(tensor, dim)


def digest(tensors: Tensors) -> int:
    """63 bits of a batch: names, shapes, dtypes and every value."""
    found = blake2b(digest_size=8)
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return int.from_bytes(found.digest(), "little") >> 1


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
    read: Read,
    alike: Mapping[str, int] | None = None,
    *,
    first_too: bool = False,
) -> Taken:
    """Reads those of `own`, and on several ranks the first of all, by which ranks that were given different
    lists are found. A collective: a few numbers of each rank.

    read: gives the tensors of a batch. alike: what must be the same on all ranks, by name. first_too: the
    first is among the batches that are given, whoever computes it.
    """
    world.doing("collate")
    several = world.size > 1
    wanted = list(own) if 0 in own or not several else [*own, 0]
    found = {index: read(batches[index], f"micro-batch {index}") for index in wanted}
    targets = sum(count_targets(found[index]) for index in own)
    rows = found[0]["input_ids"].shape[0]
    if several:
        alike = {"number of micro-batches": len(batches), **(alike or {})}
        alike["micro-batch 0 (hash; every rank is given the same list of all)"] = digest(found[0])
        world.doing("count")
        mine = torch.tensor([targets, *alike.values()], device=world.device)
        numbers = all_gather_into_tensor(mine, world.size, world.group).view(world.size, -1)
        for name, values in zip(alike, numbers[:, 1:].T.tolist(), strict=True):
            check_alike(name, values)
        targets = int(numbers[:, 0].sum())
        if 0 not in own and not first_too:
            del found[0]
    return Taken(found, targets, rows)
