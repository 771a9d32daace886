"""Whole tensors of a sharded model outside of its forward: for a while, one unit at a time, or for good.

    with mg.unsharded(model):                 # on every rank; all ranks enter and leave together
        model.merge_adapter(); ...; model.unmerge_adapter()
    for path, layer in whole_units(model):    # one layer at a time: as much memory as a forward
        ...
    mg.unshard(model)                         # for good

Inside, nothing is gathered any more: a rank may do what the others do not. What was written into a tensor is
sharded again on leaving, and must then be the same on all ranks: consistent_exit.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from monograph.distributed.consistent_exit import Early, consistent_exit
from monograph.distributed.shard import sharded_units
from monograph.distributed.sharded_layer import gathered_row
from monograph.distributed.unsharded_unit import ModulesBefore, UnshardedUnit, stored_units


@contextmanager
def unsharded(model: nn.Module) -> Iterator[nn.Module]:
    """Whole tensors on every rank inside; a model that is not sharded stays as it is.

    Every rank leaves with the others, by an error too. The bytes of all ranks are compared: of a mesh with
    replicas, those of all replicas. If they differ, if a rank fails, or if one has replaced a module
    (`merge_and_unload`), every rank raises and has the base of before. A change of modules is for
    `monograph.unshard`.
    """
    before = ModulesBefore(model, sharded_units(model))
    units: dict[str, UnshardedUnit] = {}
    try:
        for path, users in stored_units(model).items():
            units[path] = UnshardedUnit(users, gathered_row(users[0]))
    except BaseException:
        for unit in units.values():
            unit.put_back()
        raise
    try:
        yield model
    except BaseException as error:
        consistent_exit("unsharded", units, before, error)
        raise
    consistent_exit("unsharded", units, before)


def whole_units(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each unit by its path, whole until the next one is asked for. All ranks walk through all units, or
    leave at the same one. What `unsharded` does on leaving is done for each unit."""
    paths = {unit: path for path, unit in sharded_units(model).items()}
    for path, users in stored_units(model).items():
        before = ModulesBefore(model, [paths[user] for user in users])
        unit = {path: UnshardedUnit(users, gathered_row(users[0]))}
        try:
            yield path, users[0]
        except GeneratorExit:
            consistent_exit("whole_units", unit, before, Early(f"the loop was left at {path}"))
            raise
        except BaseException as error:
            consistent_exit("whole_units", unit, before, error)
            raise
        consistent_exit("whole_units", unit, before)


def unshard(model: nn.Module) -> nn.Module:
    """Makes a sharded model whole on every rank, in place, and returns it."""
    for users in stored_units(model).values():
        UnshardedUnit(users, gathered_row(users[0]))
    return model
