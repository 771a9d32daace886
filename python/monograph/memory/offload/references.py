"""Where a program keeps its tensors: places that can be read and set, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn

from monograph.upstream.torch_names import buffers_of


@dataclass(frozen=True)
class Reference:
    """A place that holds a tensor."""

    name: str
    tensor: torch.Tensor
    set: Callable[[torch.Tensor], None]


def references_in(owner: Any, name: str = "") -> Iterator[Reference]:
    """The tensors that `owner` keeps: a module (buffers and attributes, no parameters), a dict, a list, a
    dataclass such as PackedWeight, and what these hold in turn. Each place counts, shared tensors too."""
    yield from _walk(owner, name, set())


def _walk(owner: Any, name: str, seen: set[int]) -> Iterator[Reference]:
    if id(owner) in seen:
        return
    seen.add(id(owner))
    if isinstance(owner, nn.Module):
        yield from _in_module(owner, name, seen)
    elif isinstance(owner, dict):
        for key, value in owner.items():
            yield from _one(value, f"{name}[{key!r}]", _setter(owner, key), seen)
    elif isinstance(owner, list):
        for place, value in enumerate(owner):
            yield from _one(value, f"{name}[{place}]", _setter(owner, place), seen)
    elif is_dataclass(owner) and not isinstance(owner, type):
        for field in fields(owner):
            value, inside = getattr(owner, field.name), f"{name}.{field.name}" if name else field.name
            yield from _one(value, inside, _attribute(owner, field.name), seen)
    elif isinstance(owner, tuple):
        raise TypeError(
            f"offload: {name or 'the owner'} is a tuple, whose tensors cannot be replaced; wanted a list"
        )
    else:
        raise TypeError(
            f"offload: {name or 'the owner'} is a {type(owner).__name__}, wanted a module, a dict, a list or "
            "a dataclass"
        )


def _in_module(module: nn.Module, name: str, seen: set[int]) -> Iterator[Reference]:
    for path, part in module.named_modules(prefix=name):
        before = f"{path}." if path else ""
        for key, buffer in buffers_of(part).items():
            if buffer is not None:
                yield Reference(before + key, buffer, _setter(buffers_of(part), key))
        for key, value in vars(part).items():
            if not key.startswith("_") and not isinstance(value, nn.Parameter):
                yield from _one(value, before + key, _attribute(part, key), seen)


def _one(value: Any, name: str, set_value: Callable[[Any], None], seen: set[int]) -> Iterator[Reference]:
    if isinstance(value, torch.Tensor):
        yield Reference(name, value, set_value)
    elif isinstance(value, tuple):
        yield from _in_tuple(value, name, set_value)
    elif isinstance(value, (dict, list)) or (is_dataclass(value) and not isinstance(value, type)):
        yield from _walk(value, name, seen)


def _in_tuple(value: tuple[Any, ...], name: str, set_value: Callable[[Any], None]) -> Iterator[Reference]:
    """A tuple is replaced whole: the scales of a PackedWeight."""
    parts = list(value)
    if not all(isinstance(part, torch.Tensor) for part in parts):
        return

    def setter(place: int) -> Callable[[torch.Tensor], None]:
        def change(tensor: torch.Tensor) -> None:
            parts[place] = tensor
            set_value(tuple(parts))

        return change

    for place, part in enumerate(value):
        yield Reference(f"{name}[{place}]", part, setter(place))


def _setter(owner: Any, key: Any) -> Callable[[Any], None]:
    def change(value: Any) -> None:
        owner[key] = value

    return change


def _attribute(owner: Any, name: str) -> Callable[[Any], None]:
    # A frozen dataclass is changed too: it stands for the same weight before and after.
    return lambda value: object.__setattr__(owner, name, value)
