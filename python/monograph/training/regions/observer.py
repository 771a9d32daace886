"""What the Python code of a forward can read: globals, closures, attributes of classes and of objects.

The observer sees each function that a forward calls (sys.setprofile) and takes the names in its code for what
it reads: more than is read, but nothing less, as long as objects are reached by names. Objects count that
were there before: what the layer's modules hold, globals, closures. Code of torch, NumPy, Python's library
and this package is trusted: it counts neither as reading nor as writing globals.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType
from typing import Any

from torch import nn

from monograph.training.regions.clocks import impure_call
from monograph.training.regions.generators import generators_of_all
from monograph.training.regions.held import Held, HeldState, content, same
from monograph.training.regions.reachable import Reachable
from monograph.training.regions.whose_code import DYNAMIC, FOREIGN, OURS, looked_at, names_in, of_code
from monograph.upstream.torch_names import TorchDispatchMode

_HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook", "saved_tensors_hooks"})
_ROUNDS = 4


class _Unwatched(TorchDispatchMode):  # type: ignore[misc]
    """Operators on tensors without memory are thousands of calls of torch's own Python code."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = sys.getprofile()
        sys.setprofile(None)
        try:
            return func(*args, **kwargs or {})
        finally:
            sys.setprofile(before)


class Observer:
    def __init__(self, layer: nn.Module) -> None:
        self.reachable = Reachable(layer)
        # Globals, and the names of the code that has them.
        self.spaces: dict[int, tuple[dict[str, Any], Held, set[str]]] = {}
        self.of_all: list[HeldState] = generators_of_all()
        self.environment = False  # whether its variables are read
        self.reachable.enter = self._later
        self._free: dict[Any, tuple[CodeType, dict[str, Any]]] = {}
        self._codes: dict[int, tuple[CodeType, str]] = {}
        self._layer = layer

    @contextmanager
    def watching(self) -> Iterator[None]:
        before = sys.getprofile()
        try:
            with _Unwatched():
                sys.setprofile(self._event)
                yield
        finally:
            sys.setprofile(before)

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call":
            known = self._codes.get(id(code))
            if known is None:
                known = self._codes[id(code)] = (code, of_code(code, frame.f_globals))
                if known[1] == OURS:
                    self._ours(frame, code)
            if looked_at(known[1]):
                self._entered(frame, code, known[1])
        elif event == "c_call":
            known = self._codes.get(id(code))
            trusted = known is None or not looked_at(known[1])
            if (reason := impure_call(argument, trusted)) is not None:
                self.reachable.impure.append(reason)

    def _ours(self, frame: FrameType, code: CodeType) -> None:
        """Our own code reads configs, too; names of attributes stand in dictionaries."""
        self.reachable.names |= names_in(code)
        for name in code.co_names:
            table = frame.f_globals.get(name)
            if isinstance(table, dict) and len(table) < 64:
                self.reachable.names |= {s for s in (*table, *table.values()) if isinstance(s, str)}

    def _entered(self, frame: FrameType, code: CodeType, whose: str) -> None:
        self._reads(code, frame.f_globals, whose)
        names, reachable = names_in(code), self.reachable
        whole = whose == FOREIGN and not names.isdisjoint(DYNAMIC)
        values = frame.f_locals
        free = {name: values[name] for name in code.co_freevars if name in values and name != "__class__"}
        if free:
            self._free.setdefault((id(code), *map(id, free.values())), (code, free))
        for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            value = values.get(name)
            if (path := reachable.own.get(id(value))) is not None:
                reachable.see(value, path, names, whole=whole)
            elif id(value) in reachable.objects:
                reachable.see(value, reachable.objects[id(value)][1].label, names, whole=whole)

    def _later(self, function: FunctionType) -> None:
        """A function that backward will call."""
        whose = of_code(function.__code__, function.__globals__)
        if looked_at(whose):
            self._reads(function.__code__, function.__globals__, whose)

    def _reads(self, code: CodeType, space: dict[str, Any], whose: str) -> None:
        """Globals by the names of a code."""
        names, reachable = names_in(code), self.reachable
        if id(space) not in self.spaces:
            held = Held(str(space.get("__name__", "?")), space, attributes=True)
            self.spaces[id(space)] = (space, held, set())
        _, held, known = self.spaces[id(space)]
        if names <= known:
            return
        new = names - known
        known |= names
        reachable.names |= names
        if whose == FOREIGN and not names.isdisjoint(("environ", "getenv")):
            self.environment = True
        whole = whose == FOREIGN and not names.isdisjoint(DYNAMIC)
        before, reachable.follow = reachable.follow, None if names.isdisjoint(_HOOKS) else self._later
        for name in new & space.keys():
            reachable.see(space[name], f"{held.label}.{name}", names, whole=whole)
        reachable.follow = before

    def finish(self) -> None:
        """After the forward: all that its names reach, and the closures of the functions that ran."""
        self.reachable.look_again()
        for module in self._layer.modules():
            self.reachable.see(module, self.reachable.own[id(module)], self.reachable.names)
        for _ in range(_ROUNDS):
            self.reachable.look_again()
            count = len(self.reachable.objects)
            for value, held in list(self.reachable.objects.values()):
                self.reachable.see(
                    value, held.label, self.reachable.names, whole=id(value) in self.reachable.whole
                )
            if len(self.reachable.objects) == count:
                break
        self._closures()

    def _closures(self) -> None:
        """Functions that ran and that no name reached. Those made by the forward itself do not count."""
        made = {id(c) for code, _ in self._codes.values() for c in code.co_consts if isinstance(c, CodeType)}
        for code, free in self._free.values():
            if id(code) in made or self._found(code, free, self.reachable.functions.values()):
                continue
            functions = [f for f in gc.get_referrers(code) if isinstance(f, FunctionType)]
            if self._found(code, free, functions):
                for function in functions:
                    self.reachable.see(function, function.__qualname__, self.reachable.names)
            elif functions:
                self.reachable.impure.append(f"it assigns variables of {code.co_name}")

    def _found(self, code: CodeType, free: dict[str, Any], functions: Iterable[FunctionType]) -> bool:
        """Whether one of the functions has this code and these free variables."""
        for function in functions:
            if function.__code__ is code:
                cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
                if all(content(cells[name]) is value for name, value in free.items()):
                    return True
        return False

    # ---- what it did

    def changes(self) -> list[str]:
        """Why the forward cannot be traced: what it assigned, drew and asked for."""
        reachable = self.reachable
        found = list(dict.fromkeys(reachable.impure))
        found += [f"it draws from {one.label}" for one in self._generators() if one.changed()]
        assigned: list[str] = []
        for value, held in reachable.objects.values():
            assigned += held.changed(None if id(value) in reachable.whole else self.reachable.names)
        for _, held, names in self.spaces.values():
            assigned += held.changed(names)
        for held in (*reachable.containers.values(), *reachable.cells.values()):
            assigned += held.changed()
        assigned += [label for label, read, value, _ in reachable.values.values() if not same(read(), value)]
        return found + [f"it assigns {name}" for name in dict.fromkeys(assigned)]

    def put_back(self) -> None:
        for state in self._generators():
            if state.changed():
                state.put_back()
        for _, held in self.reachable.objects.values():
            held.put_back(self.reachable.names)
        for _, held, names in self.spaces.values():
            held.put_back(names)
        for held in (*self.reachable.containers.values(), *self.reachable.cells.values()):
            held.put_back()
        for _, read, value, write in self.reachable.values.values():
            if write is not None and read() is not value:
                write(value)

    def _generators(self) -> list[HeldState]:
        return [*self.of_all, *self.reachable.generators.values()]
