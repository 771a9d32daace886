"""What a trace relies on beside the layer's signature: values that its code read while it was traced."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CellType, ModuleType
from typing import Any

import torch

from monograph.training.regions.held import MISSING, content, same_to_a_trace
from monograph.training.regions.observer import Observer
from monograph.training.regions.reachable import attributes, is_special
from monograph.training.regions.whose_code import looked_at, of_module

# What torch itself reads when a layer makes a tensor or calls its attention.
_OF_TORCH: dict[str, Callable[[], Any]] = {
    "torch's default dtype": torch.get_default_dtype,
    "torch.backends.cuda.flash_sdp_enabled()": torch.backends.cuda.flash_sdp_enabled,
    "torch.backends.cuda.math_sdp_enabled()": torch.backends.cuda.math_sdp_enabled,
}


@dataclass(frozen=True)
class Reads:
    """named: (label, what has the names, names and values). ordered: (label, container, its elements).
    computed: (label, function, its result)."""

    named: tuple[tuple[str, Mapping[str, Any], tuple[tuple[str, Any], ...]], ...]
    ordered: tuple[tuple[str, Any, tuple[Any, ...]], ...]
    computed: tuple[tuple[str, Callable[[], Any], Any], ...]

    def changed(self) -> str | None:
        """What is not as it was, with both values; None if everything is. Runs at each call of a region."""
        for label, mapping, pairs in self.named:
            get = mapping.get
            for name, value in pairs:
                now = get(name, MISSING)
                if now is not value and not same_to_a_trace(now, value):
                    return f"{label}.{name} is {_shown(now)}, was {_shown(value)}"
        for label, container, values in self.ordered:
            if len(container) != len(values):
                return f"{label} has {len(container)} elements, had {len(values)}"
            for now, value in zip(container, values, strict=True):
                if now is not value and not same_to_a_trace(now, value):
                    return f"{label} holds {_shown(now)}, held {_shown(value)}"
        for label, function, value in self.computed:
            now = function()
            if now is not value and not same_to_a_trace(now, value):
                return f"{label} is {_shown(now)}, was {_shown(value)}"
        return None


def _shown(value: Any) -> str:
    if value is MISSING:
        return "not there"
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    shown = repr(value) if not isinstance(value, torch.Tensor) else f"{value.dtype} {list(value.shape)}"
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def reads_of(observer: Observer) -> Reads:
    reachable = observer.reachable
    named, ordered, computed = [], [], []
    for space, held, names in observer.spaces.values():
        pairs = [(n, space[n]) for n in names if n in space and not isinstance(space[n], ModuleType)]
        named.append((held.label, space, tuple(pairs)))
    for value, held in reachable.objects.values():
        if isinstance(value, type):
            names = reachable.names & _inherited(value)
        elif id(value) in reachable.whole:
            names = set(vars(value)) | reachable.names & _inherited(type(value))
        else:
            names = attributes(value, reachable.names) & (vars(value).keys() | _inherited(type(value)))
        mapping = vars(value)
        named.append((held.label, mapping, tuple((n, mapping.get(n, MISSING)) for n in names)))
    for place, held in reachable.containers.items():
        if place in reachable.in_signature:
            continue
        if isinstance(held.container, dict):
            named.append((held.label, held.container, tuple(dict.items(held.container))))
            ordered.append((held.label, held.container, tuple(held.container)))
        elif isinstance(held.container, set):
            computed.append((held.label, _members(held.container), _members(held.container)()))
        else:
            ordered.append((held.label, held.container, tuple(held.container)))
    for held in reachable.cells.values():
        computed.append((held.label, _inside(held.container), content(held.container)))
    computed += [(label, read, value) for label, read, value, _ in reachable.values.values()]
    computed += [(label, read, read()) for label, read in _OF_TORCH.items()]
    if observer.environment:
        computed.append(("os.environ", _environment, _environment()))
    return Reads(tuple(entry for entry in named if entry[2]), tuple(ordered), tuple(computed))


def _inherited(cls: type) -> set[str]:
    """Names that a class, or one before it, has and that are looked at."""
    return {
        name
        for one in cls.__mro__
        if looked_at(of_module(one.__module__))
        for name in vars(one)
        if not is_special(name)
    }


def _members(members: set[Any]) -> Callable[[], Any]:
    return lambda: tuple(sorted(members, key=id))


def _inside(cell: CellType) -> Callable[[], Any]:
    return lambda: content(cell)


def _environment() -> int:
    """A number: what stands there may be secret."""
    return hash(frozenset(os.environ.items()))
