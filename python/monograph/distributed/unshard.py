"""Whole tensors of a sharded model outside of its forward: for a while, one unit at a time, or for good.

    with mg.unsharded(model):                 # on every rank; all ranks enter and leave together
        model.merge_adapter(); ...; model.unmerge_adapter()
    for path, layer in whole_units(model):    # one layer at a time: as much memory as a forward
        ...
    mg.unshard(model)                         # for good

Inside, nothing is gathered any more: a rank may do what the others do not. What was written into a tensor is
cut again on leaving, and must then be the same on all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from monograph.distributed.file_ranges import read_range
from monograph.distributed.shard import shard_group_of, sharded_units
from monograph.distributed.sharded_away import ShardedAway
from monograph.distributed.sharded_layer import ShardedLayer, gathered_row
from monograph.distributed.world import World
from monograph.integrations.torch.instance_class import take_off
from monograph.integrations.torch.private_names import parameters_of

_ATTRIBUTES = ("shard_cut", "shard_holder")


@contextmanager
def unsharded(model: nn.Module) -> Iterator[nn.Module]:
    """Whole tensors on every rank inside; a model that is not sharded stays as it is.

    A module that was replaced inside (`merge_and_unload`) has no place to cut its tensors into: an error on
    leaving, and the model stays whole. For such changes there is `monograph.unshard`.
    """
    world = shard_group_of(model)
    units = [WholeUnit(users, gathered_row(users[0])) for users in stored_units(model).values()]
    try:
        yield model
    except BaseException:
        for unit in units:  # the others are not waited for: they may not come
            if not unit.problem():
                unit.cut_again()
        raise
    if world is not None:
        _leave(units, world)


def whole_units(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each unit by its path, whole until the next one is asked for. All ranks walk through all units."""
    world = shard_group_of(model)
    for path, users in stored_units(model).items():
        assert world is not None
        unit = WholeUnit(users, gathered_row(users[0]))
        try:
            yield path, users[0]
        except GeneratorExit:
            unit.cut_again()
            raise
        _leave([unit], world)


def unshard(model: nn.Module) -> nn.Module:
    """Makes a sharded model whole on every rank, in place, and returns it."""
    for users in stored_units(model).values():
        WholeUnit(users, gathered_row(users[0]))
    return model


def stored_units(model: nn.Module) -> dict[str, list[ShardedLayer]]:
    """The modules that read a row of bytes, the one that holds it first, by the path of that one."""
    units = sharded_units(model)
    found = {path: [unit] for path, unit in units.items() if not unit.shard_holder}
    for unit in units.values():
        for users in found.values():
            if unit.shard_holder and unit.shard_holder[0] is users[0]:
                users.append(unit)
    return found


class WholeUnit:
    """A unit with whole tensors, views of `row`; no ShardedLayer meanwhile."""

    def __init__(self, users: list[ShardedLayer], row: torch.Tensor) -> None:
        self.users = users
        self.layout, self.group = users[0].shard_cut.layout, users[0].shard_cut.group
        self.places = [user.shard_cut.places for user in users]
        self._classes = [type(user) for user in users]
        self._attributes = [{name: vars(user)[name] for name in _ATTRIBUTES} for user in users]
        self._away: list[tuple[dict[str, Any], str, ShardedAway]] = []
        self.shard: Any = parameters_of(users[0]).pop("shard")
        whole = {
            name: nn.Parameter(view, requires_grad=False) for name, view in self.layout.views(row).items()
        }
        for user, places in zip(users, self.places, strict=True):
            for path, name, piece in places:
                own: Any = parameters_of(user.get_submodule(path))
                if isinstance(own.get(name), ShardedAway):
                    self._away.append((own, name, own[name]))
                    own[name] = whole[piece]
            take_off(ShardedLayer, user)
            for name in _ATTRIBUTES:
                del vars(user)[name]

    def _tensors(self) -> Iterator[tuple[str, str, torch.Tensor | None]]:
        """(name in the unit, piece, what is there now)."""
        for user, places in zip(self.users, self.places, strict=True):
            modules = dict(user.named_modules())
            for path, name, piece in places:
                own = parameters_of(modules[path]) if path in modules else {}
                yield (f"{path}.{name}" if path else name), piece, own.get(name)

    def problem(self) -> str | None:
        """Why the tensors that are there now cannot be cut as those before were."""
        found: dict[str, torch.Tensor] = {}
        wanted = {piece.name: piece for piece in self.layout.pieces}
        for name, piece, tensor in self._tensors():
            if tensor is None:
                return f"{name} is gone: the module was replaced, as a merge does"
            same = (tuple(tensor.shape), tensor.dtype) == (wanted[piece].shape, wanted[piece].dtype)
            if not same:
                return f"{name} is {list(tensor.shape)} {tensor.dtype}, was {list(wanted[piece].shape)}"
            if tensor.requires_grad:
                return f"{name} requires a gradient now"
            if found.setdefault(piece, tensor) is not tensor:
                return f"{name} is no longer tied"
        return None

    def own_bytes(self) -> torch.Tensor:
        """This rank's part of what is there now."""
        present = {piece: tensor for _, piece, tensor in self._tensors() if tensor is not None}
        return read_range(present, self.layout, self.group.rank)

    def digest(self) -> str:
        """Of all bytes that are there now."""
        found = hashlib.sha256()
        for _, _, tensor in self._tensors():
            assert tensor is not None
            found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()

    @torch.no_grad()
    def cut_again(self, own: torch.Tensor | None = None) -> None:
        own = self.own_bytes() if own is None else own
        if not torch.equal(own, self.shard):
            self.shard.copy_(own)  # the same parameter: graphs hold it
        self.put_back()

    def put_back(self) -> None:
        """The unit as it was, whatever its tensors hold now."""
        for user, own_class, attributes in zip(self.users, self._classes, self._attributes, strict=True):
            user.__class__ = own_class
            vars(user).update(attributes)
        for own, name, away in self._away:
            own[name] = away
        parameters_of(self.users[0])["shard"] = self.shard


def _leave(units: list[WholeUnit], world: World) -> None:
    for unit in units:
        if problem := unit.problem():
            raise RuntimeError(
                f"unsharded: {problem}, so that it cannot be cut among ranks again; the model stays whole; "
                "wanted monograph.unshard(model) for such a change"
            )
    own = [unit.own_bytes() for unit in units]
    changed = [not torch.equal(part, unit.shard) for part, unit in zip(own, units, strict=True)]
    anywhere = [any(of_ranks) for of_ranks in zip(*world.gathered(changed), strict=True)]
    digests = [unit.digest() if there else "" for unit, there in zip(units, anywhere, strict=True)]
    if any(anywhere):
        for rank, others in enumerate(world.gathered(digests)):
            if others != digests:
                raise RuntimeError(
                    f"unsharded: rank {rank} has written other bytes than rank {world.rank} into the same "
                    "tensors, wanted the same change on all ranks; the model stays whole"
                )
    for unit, part in zip(units, own, strict=True):
        unit.cut_again(part)
