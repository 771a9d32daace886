"""UnshardedUnit: a unit of a sharded model with whole tensors for a while, and the way back."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from monograph.distributed.file_ranges import read_range
from monograph.distributed.shard import sharded_units
from monograph.distributed.shard_placeholder import ShardPlaceholder
from monograph.distributed.sharded_layer import ShardedLayer, gathered_row
from monograph.upstream.instance_class import take_off
from monograph.upstream.torch_names import children, parameters_of

_ATTRIBUTES = ("shard_spec", "shard_holder")


def stored_units(model: nn.Module) -> dict[str, list[ShardedLayer]]:
    """The modules that read a row of bytes, the one that holds it first, by the path of that one."""
    units = sharded_units(model)
    found = {path: [unit] for path, unit in units.items() if not unit.shard_holder}
    for unit in units.values():
        for users in found.values():
            if unit.shard_holder and unit.shard_holder[0] is users[0]:
                users.append(unit)
    return found


class UnshardedUnit:
    """A unit with whole tensors, views of `row`; no ShardedLayer meanwhile."""

    def __init__(self, users: list[ShardedLayer], row: torch.Tensor) -> None:
        self.users = users
        self.layout, self.group = users[0].shard_spec.layout, users[0].shard_spec.group
        self.places = [user.shard_spec.places for user in users]
        self._classes = [type(user) for user in users]
        self._attributes = [{name: vars(user)[name] for name in _ATTRIBUTES} for user in users]
        self._away: list[tuple[dict[str, Any], str, ShardPlaceholder]] = []
        self.shard: Any = vars(users[0]).pop("shard")
        whole = {
            name: nn.Parameter(view, requires_grad=False) for name, view in self.layout.views(row).items()
        }
        for user, places in zip(users, self.places, strict=True):
            for path, name, piece in places:
                own: Any = parameters_of(user.get_submodule(path))
                if isinstance(own.get(name), ShardPlaceholder):
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
        """Why the tensors that are there now cannot be sharded as those before were."""
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

    def _present(self) -> dict[str, torch.Tensor]:
        return {piece: tensor for _, piece, tensor in self._tensors() if tensor is not None}

    def written(self) -> torch.Tensor | None:
        """This rank's part of what is there now, if it is no longer its shard."""
        own = read_range(self._present(), self.layout, self.group.rank)
        return None if torch.equal(own, self.shard) else own

    def checksums(self) -> dict[str, int]:
        """Of all bytes of each piece as they are now."""
        return _checksums(self._present())

    def checksums_before(self) -> dict[str, int]:
        """Of what the shards of all ranks hold. A collective, after `put_back`."""
        return _checksums(self.layout.views(gathered_row(self.users[0])))

    @torch.no_grad()
    def reshard(self, own: torch.Tensor | None) -> None:
        """own: this rank's new bytes, None for those of before."""
        if own is not None:
            self.shard.copy_(own)  # the same parameter: graphs hold it
        self.put_back()

    def put_back(self) -> None:
        """The unit as it was, whatever its tensors hold now."""
        for user, own_class, attributes in zip(self.users, self._classes, self._attributes, strict=True):
            user.__class__ = own_class
            vars(user).update(attributes)
        for own, name, away in self._away:
            own[name] = away
        vars(self.users[0])["shard"] = self.shard


def _checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {
        piece: zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        for piece, tensor in tensors.items()
    }


class ModulesBefore:
    """The modules above the tensors of sharded units, and what was merged into those: what a merge changes
    beside the bytes. paths: of modules that read units."""

    def __init__(self, model: nn.Module, paths: Iterable[str]) -> None:
        self._ways: list[tuple[dict[str, Any], str, nn.Module]] = []
        self._merged: list[tuple[Any, list[str]]] = []
        known: set[tuple[str, ...]] = set()
        for unit in paths:
            user: Any = model.get_submodule(unit)
            for inner in {path for path, _, _ in user.shard_spec.places}:
                parts = [part for part in f"{unit}.{inner}".split(".") if part]
                known.update(tuple(parts[:end]) for end in range(1, len(parts) + 1))
        for way in sorted(known):
            above: Any = children(model.get_submodule(".".join(way[:-1])))
            self._ways.append((above, way[-1], above[way[-1]]))
        for _, _, module in self._ways:
            merged = getattr(module, "merged_adapters", None)
            if isinstance(merged, list):
                self._merged.append((module, list(merged)))

    def bring_back(self) -> None:
        """While the tensors are whole."""
        for layer, merged in self._merged:
            if layer.merged_adapters and not merged:
                layer.unmerge()
            layer.merged_adapters = merged
        for above, name, module in self._ways:
            above[name] = module
