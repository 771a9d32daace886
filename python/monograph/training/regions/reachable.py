"""Python objects that code can reach by names: what they hold is copied when they are first seen."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Set
from contextvars import ContextVar
from operator import attrgetter, methodcaller
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from monograph.training.regions.generators import generator
from monograph.training.regions.held import CONTAINERS, MISSING, SIMPLE, Held, HeldState, content
from monograph.training.regions.whose_code import looked_at, of_module
from monograph.upstream.torch_names import children

MOST_ELEMENTS = 4096  # of a container that is compared at each call
_DEEPEST = 8
_MODULES_OWN = frozenset(vars(nn.Module()))
_OPAQUE = frozenset({"torch", "monograph", "logging"})  # what they hold is theirs
_CACHED = type(functools.lru_cache(lambda: None))


class Reachable:
    """objects, containers, cells: by id, so that each is held once. A container in `in_signature` is told by
    the layer's signature already; of an object in `whole` every attribute counts, of others those that code
    names."""

    def __init__(self, layer: nn.Module) -> None:
        self.own = {id(module): path or "the layer" for path, module in layer.named_modules()}
        self.objects: dict[int, tuple[Any, Held]] = {}
        self.containers: dict[int, Held] = {}
        self.cells: dict[int, Held] = {}
        self.functions: dict[int, FunctionType] = {}
        self.generators: dict[int, HeldState] = {}
        self.values: dict[
            Any, tuple[str, Any, Any, Any]
        ] = {}  # label, how to read it, what it is, how to set it
        self.in_signature: set[int] = set()
        self.whole: set[int] = set()
        self.names: set[str] = {"forward"}  # in all code that ran
        self.impure: list[str] = []
        # Told of functions that backward will call, and, while `follow` is set, of all that are seen.
        self.enter: Callable[[FunctionType], None] | None = None
        self.follow: Callable[[FunctionType], None] | None = None
        self._seen: dict[tuple[int, int, bool, bool], tuple[int, Any]] = {}  # with their depths
        for path, module in layer.named_modules():
            for name, value in vars(module).items():
                if name not in _MODULES_OWN and not name.startswith("region_"):
                    self.see(value, f"{path}.{name}" if path else name, frozenset(), in_signature=True)
        self.impure.clear()  # nobody has read anything yet

    def see(
        self, value: Any, label: str, names: Set[str], depth: int = 0, *, in_signature: bool = False,
        whole: bool = False,
    ) -> None:  # fmt: skip
        """Holds what a value holds, and goes on to what code with these names reaches from there."""
        if type(value) in SIMPLE or isinstance(value, torch.Tensor) or depth > _DEEPEST:
            return
        key = (id(value), id(names), in_signature, whole)
        before, _ = self._seen.get(key, (_DEEPEST + 1, None))
        if before <= depth:  # on another way, or it holds itself
            return
        self._seen[key] = (depth, (value, names))
        self._see(value, label, names, depth + 1, in_signature, whole)

    def look_again(self) -> None:
        """What was seen may hold more by now, and `names` have more."""
        self._seen.clear()

    def _see(
        self, value: Any, label: str, names: Set[str], depth: int, in_signature: bool, whole: bool
    ) -> None:
        if isinstance(value, CONTAINERS):
            self._container(value, label, names, depth, in_signature, whole)
        elif isinstance(value, (tuple, frozenset)):
            for part in value:
                self.see(part, f"{label}[...]", names, depth, in_signature=in_signature, whole=whole)
        elif isinstance(value, FunctionType):
            self._function(value, label, names, depth, whole)
        elif isinstance(value, (staticmethod, classmethod, MethodType)):
            self.see(value.__func__, label, names, depth)
            if isinstance(value, MethodType):
                self.see(value.__self__, label, names, depth, whole=whole)
        elif isinstance(value, BuiltinFunctionType):
            if not isinstance(value.__self__, (ModuleType, type)):
                self.see(value.__self__, label, names, depth, whole=whole)
        elif isinstance(value, property):
            for part in (value.fget, value.fset):
                self.see(part, label, names, depth)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self.see(part, label, names, depth, in_signature=in_signature, whole=whole)
        elif isinstance(value, _CACHED):
            for part in gc.get_referents(value):  # its function and what it returned before
                results = list(part.values()) if isinstance(part, dict) else [part]
                for result in results:
                    if not isinstance(result, type):
                        self.see(result, f"{label}()", names, depth, whole=whole)
        elif isinstance(value, ModuleType):
            if looked_at(of_module(value.__name__)):
                self._namespace(value, label, names, depth, whole)
        elif isinstance(value, type):
            self._class(value, names, depth)
        elif isinstance(value, threading.local):
            self.impure.append(f"it may read {label}, which is another in each thread")
        elif isinstance(value, ContextVar):
            self.values[id(value)] = (label, functools.partial(value.get, None), value.get(None), value.set)
            self.see(value.get(None), label, names, depth, whole=whole)
        elif isinstance(value, weakref.ref):
            self.see(value(), label, names, depth, whole=whole)
        elif (found := generator(value, label)) is not None:
            self.generators.setdefault(id(value), found)
        else:
            self._object(value, label, names, depth, whole)

    def _container(
        self, value: Any, label: str, names: Set[str], depth: int, in_signature: bool, whole: bool
    ) -> None:
        if len(value) > MOST_ELEMENTS:
            self.impure.append(f"it may read {label}, whose {len(value)} elements are too many to compare")
            return
        if id(value) not in self.containers:
            self.containers[id(value)] = Held(label, value)
            if in_signature and isinstance(value, (dict, list, set)):
                self.in_signature.add(id(value))
        if not in_signature:
            self.in_signature.discard(id(value))
        if isinstance(value, bytearray):
            return
        entries = list(dict.items(value) if isinstance(value, dict) else enumerate(value))
        for place, part in entries:
            self.see(part, f"{label}[{place!r}]", names, depth, in_signature=in_signature, whole=whole)

    def _function(self, value: FunctionType, label: str, names: Set[str], depth: int, whole: bool) -> None:
        self.functions[id(value)] = value
        if self.follow is not None:
            self.follow(value)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if name == "__class__":
                continue
            if id(cell) not in self.cells:
                self.cells[id(cell)] = Held(f"{label}: {name}", cell)
            if (inside := content(cell)) is not MISSING:
                self.see(inside, f"{label}: {name}", names, depth, whole=whole)

    def _class(self, cls: type, names: Set[str], depth: int) -> None:
        if issubclass(cls, torch.autograd.Function) and self.enter is not None:
            for value in vars(cls).values():
                if isinstance(value, staticmethod) and isinstance(value.__func__, FunctionType):
                    self.enter(value.__func__)
        for one in cls.__mro__:
            if not looked_at(of_module(one.__module__)):
                continue
            if id(one) not in self.objects:
                self.objects[id(one)] = (one, Held(one.__name__, one, attributes=True))
            held = vars(one)
            for name in names & held.keys():
                if not is_special(name):
                    self.see(held[name], f"{one.__name__}.{name}", names, depth)

    def _namespace(self, value: Any, label: str, names: Set[str], depth: int, whole: bool) -> None:
        held = vars(value)
        if id(value) not in self.objects and id(value) not in self.own:
            self.objects[id(value)] = (value, Held(label, held, attributes=True))
        every = whole and len(held) < MOST_ELEMENTS
        if every:
            self.whole.add(id(value))
        own = id(value) in self.own
        for name in (set(held) if every else attributes(value, names) & held.keys()) - _MODULES_OWN:
            self.see(held[name], f"{label}.{name}", names, depth, in_signature=own, whole=whole)
        if isinstance(value, nn.Module) and not own:
            for name in names & children(value).keys():
                self.see(children(value)[name], f"{label}.{name}", names, depth, whole=whole)

    def _object(self, value: Any, label: str, names: Set[str], depth: int, whole: bool) -> None:
        kind = type(value)
        package = kind.__module__.partition(".")[0]
        if package in _OPAQUE and not isinstance(value, nn.Module):
            return
        if isinstance(value, (attrgetter, methodcaller)):
            self.names |= {name for part in value.__reduce__()[1] for name in str(part).split(".")}
            return
        if kind.__module__ == "numpy" and hasattr(value, "tobytes"):
            if value.nbytes > MOST_ELEMENTS:
                self.impure.append(f"it may read {label}, whose {value.nbytes} bytes are too many to compare")
            self.values[id(value)] = (label, value.tobytes, value.tobytes(), None)
            return
        if hasattr(value, "__dict__"):
            self._namespace(value, label, names, depth, whole)
        elif hasattr(value, "__next__"):
            self.impure.append(f"it may read the iterator {label}, which cannot be compared")
        for cls in kind.__mro__:
            slots = vars(cls).get("__slots__", ())
            for name in {slots} if isinstance(slots, str) else set(slots):
                if (whole or name in names) and hasattr(value, name):
                    read = functools.partial(getattr, value, name, MISSING)
                    write = functools.partial(setattr, value, name)
                    self.values.setdefault((id(value), name), (f"{label}.{name}", read, read(), write))
                    self.see(read(), f"{label}.{name}", names, depth, whole=whole)
        self._class(kind, names, depth)


def is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def attributes(value: Any, names: Set[str]) -> Set[str]:
    """With the other names that a config of transformers has for some of its attributes."""
    known = getattr(type(value), "attribute_map", None)
    if isinstance(known, dict):
        return names | {known[name] for name in names & known.keys()}
    return names
