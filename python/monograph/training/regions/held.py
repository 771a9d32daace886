"""What Python objects hold: copies to compare with, to see what a forward changed, and to put it back.

A copy is shallow: containers inside a container are held for themselves.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, MutableMapping, Set
from types import CellType, MethodType
from typing import Any

import torch

MISSING: Any = object()
CONTAINERS = (dict, list, set, deque, bytearray)
_EQUAL = frozenset({bool, int, complex, str, bytes, torch.dtype, torch.device, torch.Size, range})
SIMPLE = _EQUAL | {float, type(None), type(Ellipsis)}


def same(one: Any, other: Any) -> bool:
    """Whether code that reads one would read the same in the other. Objects are the same by identity."""
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is float:
        equal = one == other and math.copysign(1.0, one) == math.copysign(1.0, other)
        return equal or (one != one and other != other)
    if kind in _EQUAL:
        return bool(one == other)
    if kind is tuple:
        return len(one) == len(other) and all(map(same, one, other))
    if kind is MethodType:
        return one.__func__ is other.__func__ and one.__self__ is other.__self__
    return False


def same_to_a_trace(one: Any, other: Any) -> bool:
    """As `same`. Of tensors that are no input a trace can have read the shape alone."""
    if same(one, other):
        return True
    if isinstance(one, torch.Tensor) and type(one) is type(other):
        return bool(one.shape == other.shape and one.dtype == other.dtype and one.device == other.device)
    return False


def content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return MISSING


class Held:
    """A container and its copy. `changed` names what differs, `put_back` undoes it."""

    def __init__(self, label: str, container: Any, attributes: bool = False) -> None:
        self.label, self.container, self._place = label, container, "{}.{}" if attributes else "{}[{!r}]"
        self.before = _copied(container)

    def changed(self, names: Set[str] | None = None) -> Iterator[str]:
        """names: those that count; None: all."""
        now = _copied(self.container)
        if isinstance(now, dict):
            for name in {**self.before, **now}:
                counts = names is None or name in names
                if counts and not same(self.before.get(name, MISSING), now.get(name, MISSING)):
                    yield self._place.format(self.label, name)
        elif len(now) != len(self.before) or not all(map(same, now, self.before)):
            yield self.label

    def put_back(self, names: Set[str] | None = None) -> None:
        now, before = _copied(self.container), self.before
        if isinstance(now, dict):
            for name in {**before, **now}:
                value = before.get(name, MISSING)
                if (names is not None and name not in names) or now.get(name, MISSING) is value:
                    continue
                if value is MISSING:
                    self._delete(name)
                else:
                    self._set(name, value)
        elif isinstance(self.container, CellType):
            if before[0] is not MISSING:
                self.container.cell_contents = before[0]
        elif isinstance(self.container, list):
            list.__setitem__(self.container, slice(None), before)
        elif isinstance(self.container, bytearray):
            self.container[:] = before
        else:
            self.container.clear()
            add = self.container.update if isinstance(self.container, set) else self.container.extend
            add(before)

    def _set(self, name: str, value: Any) -> None:
        if isinstance(self.container, dict):
            _plain_class(self.container).__setitem__(self.container, name, value)
        elif isinstance(self.container, MutableMapping):
            self.container[name] = value
        else:
            setattr(self.container, name, value)

    def _delete(self, name: str) -> None:
        if isinstance(self.container, dict):
            _plain_class(self.container).__delitem__(self.container, name)
        elif isinstance(self.container, MutableMapping):
            del self.container[name]
        else:
            delattr(self.container, name)


def _plain_class(container: dict[Any, Any]) -> Any:
    """Whose methods store and delete, and nothing else; that of an ordered one keeps the order too."""
    return OrderedDict if isinstance(container, OrderedDict) else dict


class HeldState:
    """An object that tells its state, as a generator does."""

    def __init__(self, label: str, state: Callable[[], Any], set_state: Callable[[Any], Any]) -> None:
        self.label, self._state, self._set_state = label, state, set_state
        self.before = state()

    def changed(self) -> bool:
        return _bits(self._state()) != _bits(self.before)

    def put_back(self) -> None:
        self._set_state(self.before)


def _bits(state: Any) -> Hashable:
    """A state of any of the generators, to be compared."""
    if isinstance(state, torch.Tensor):
        return bytes(state.numpy())
    if isinstance(state, dict):
        return tuple((name, _bits(part)) for name, part in state.items())
    if isinstance(state, (tuple, list)):
        return tuple(_bits(part) for part in state)
    return state.tobytes() if hasattr(state, "tobytes") else state


def _copied(container: Any) -> Any:
    """A dictionary for what has names; for others something with a length and an order.

    What is stored, whatever a subclass makes of it when it is read: transformers' ACT2FN makes an object.
    """
    if isinstance(container, dict):
        return dict(dict.items(container))
    if isinstance(container, CellType):
        return (content(container),)
    if isinstance(container, type):
        return dict(vars(container))
    if isinstance(container, set):
        return sorted(set.__iter__(container), key=id)
    return list.copy(container) if isinstance(container, list) else list(container)
