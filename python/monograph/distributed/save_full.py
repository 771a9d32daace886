"""save_pretrained of a sharded base: the folder that the whole model would write, by rank 0.

Rank 0 collects the units one by one in a file beside the folder and saves with them mapped: one unit at a
time is in memory. The file takes the base's size on the disk until the folder is written.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from monograph.distributed.shard import shard_group_of
from monograph.distributed.sharded_layer import ShardedLayer, gathered_row
from monograph.distributed.unsharded_unit import UnshardedUnit, stored_units
from monograph.distributed.world import gathered_over


def save_pretrained(model: nn.Module, folder: str | os.PathLike[str], **options: Any) -> None:
    """`model.save_pretrained(folder, **options)` for a model that may be sharded. All ranks call it.

    An adapter needs no base: `PeftModel.save_pretrained` on one rank.
    """
    if hasattr(model, "get_base_model"):
        raise ValueError(
            f"save_pretrained: the model is a {type(model).__name__}, wanted model.get_base_model(); an "
            "adapter is saved by its own save_pretrained, on one rank"
        )
    savable: Any = model
    world = shard_group_of(model)
    if world is None:
        savable.save_pretrained(folder, **options)
        return
    trouble = None
    if 0 in dist.get_process_group_ranks(world.group):  # replicas of it have nothing to do
        if dist.get_rank() == 0:
            trouble = _write(savable, folder, options)
        else:
            _send(model)
    for found in gathered_over(None, trouble):
        if found is not None:
            raise RuntimeError(f"save_pretrained: rank 0 could not write {os.fspath(folder)}: {found}")


def _send(model: nn.Module) -> None:
    for users in stored_units(model).values():
        gathered_row(users[0])


def _write(model: Any, folder: str | os.PathLike[str], options: dict[str, Any]) -> str | None:
    """What went wrong. The gathers run to their end in any case: the other ranks are in them."""
    units = list(stored_units(model).values())
    opened: list[Any] = []
    trouble = _trouble_of(lambda: opened.append(_file_beside(folder)))
    for users in units:
        row = gathered_row(users[0])
        if trouble is None:
            trouble = _trouble_of(partial(opened[0].write, row.numpy().data))
    if trouble is None:
        trouble = _trouble_of(lambda: _save(model, folder, options, opened[0], units))
    for file in opened:
        closed = _trouble_of(file.close)  # writes what is left: a full disk is told here once more
        trouble = trouble or closed
    return trouble


def _trouble_of(work: Callable[[], Any]) -> str | None:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _file_beside(folder: str | os.PathLike[str]) -> Any:
    parent = os.path.dirname(os.path.abspath(folder))
    os.makedirs(parent, exist_ok=True)
    return tempfile.NamedTemporaryFile(dir=parent, prefix=".whole-")


def _save(
    model: Any,
    folder: str | os.PathLike[str],
    options: dict[str, Any],
    file: Any,
    units: list[list[ShardedLayer]],
) -> None:
    """file: the rows of all units."""
    file.flush()
    total = sum(users[0].shard_spec.layout.nbytes for users in units)
    bytes_of_all = torch.from_file(file.name, shared=False, size=total, dtype=torch.uint8)
    whole, at = [], 0
    try:
        for users in units:
            size = users[0].shard_spec.layout.nbytes
            whole.append(UnshardedUnit(users, bytes_of_all[at : at + size]))
            at += size
        model.save_pretrained(folder, **options)
    finally:
        for unit in whole:
            unit.put_back()
