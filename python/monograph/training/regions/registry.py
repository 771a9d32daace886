"""Which layers are regions, and the traces they share."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from monograph.training.regions import layer_index
from monograph.training.regions.call import differentiated
from monograph.training.regions.layer_function import Request
from monograph.training.regions.layer_signature import State, state_of
from monograph.training.regions.lengths import fixed_sizes
from monograph.training.regions.trace import FORWARD, Traced, trace
from monograph.training.regions.trained import layout_of
from monograph.upstream.torch_names import size_hint

_LAYERS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_LOCK = threading.RLock()
_NUMBERS = itertools.count()
_WORDS = itertools.count()  # never given twice: a graph may ask for a layer that is gone
MOST_CHANGES = 8  # of what a layer reads: so often it is traced anew
_log = logging.getLogger("monograph")
_GONE: deque[str] = deque()  # words of layers that are gone, whose traces nobody has dropped yet


@dataclass
class Traces:
    """by_signature: the traces of each layer signature; more than one if lengths did not keep the
    relations of the first. A trace lives as long as a layer that it was found for."""

    by_signature: dict[Hashable, list[Traced]] = field(default_factory=dict)
    by_number: dict[int, Traced] = field(default_factory=dict)
    numbered: set[Hashable] = field(default_factory=set)  # signatures that compute with the layer's number
    users: dict[int, set[str]] = field(default_factory=dict)  # words of layers by number of the trace
    busy: bool = False

    @property
    def graphs(self) -> int:
        return sum(1 + (traced.backward is not None) for traced in self.by_number.values())

    @property
    def signatures(self) -> int:
        return len(self.by_signature)

    @property
    def retraced(self) -> int:
        return len(self.by_number) - len(self.by_signature)


TRACES = Traces()


def forget() -> None:
    """All traces are gone and are made anew."""
    with _LOCK:
        for kept in (TRACES.by_signature, TRACES.by_number, TRACES.numbered, TRACES.users):
            kept.clear()


def enter(name: str, layer: Any) -> str:
    """Gives a layer a word of its own, by which the operator finds it."""
    word = f"{name}#{next(_WORDS)}"
    with _LOCK:
        _LAYERS[word] = layer
    weakref.finalize(layer, _left, word).atexit = False
    return word


def _left(word: str) -> None:
    """Runs when a layer is gone, at any time: also in the middle of `traced_for`, which does it then."""
    _GONE.append(word)
    if _LOCK.acquire(blocking=False):
        try:
            if not TRACES.busy:
                _drop_unused()
        finally:
            _LOCK.release()


def _drop_unused() -> None:
    while _GONE:
        word = _GONE.popleft()
        for number in [number for number, words in TRACES.users.items() if word in words]:
            TRACES.users[number].discard(word)
            if not TRACES.users[number]:
                del TRACES.users[number], TRACES.by_number[number]
    alive = TRACES.by_number
    for signature, found in list(TRACES.by_signature.items()):
        found[:] = [traced for traced in found if traced.number in alive]
        if not found:
            del TRACES.by_signature[signature]
            if isinstance(signature, tuple):
                TRACES.numbered.discard(signature[0])


def layer_of(word: str) -> Any:
    layer = _LAYERS.get(word)
    if layer is None:
        raise RuntimeError(f"region {word}: the layer no longer exists; wanted the model to be kept")
    return layer


def real(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with these sizes for a trace: itself, or an empty one in the place of a symbolic one."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta:
        return tensor
    sizes = [size_hint(n) for n in tensor.shape]
    return torch.empty(sizes, dtype=tensor.dtype, device=tensor.device)


def _kind_of_lengths(tensor: torch.Tensor, is_differentiated: bool) -> Hashable:
    sizes = zip(tensor.shape, fixed_sizes(tensor, is_differentiated), strict=True)
    return tensor.dtype, tensor.device, tuple(int(size) if fixed else None for size, fixed in sizes)


@dataclass(frozen=True)
class Called:
    """A call of the operator: its arguments but for the trained parameters."""

    word: str
    call: str
    trained: str
    mode: str
    autocast: str
    activations: Sequence[torch.Tensor]
    seed: torch.Tensor | None


def traced_for(called: Called) -> tuple[Traced, State]:
    """The trace that fits a layer as it is now, made if there is none."""
    layer = layer_of(called.word)
    state = state_of(layer)
    layout = layout_of(called.trained)
    _check(called, state, layout.names)
    wanted = differentiated(called.call)
    lengths = tuple(
        _kind_of_lengths(t, place == -1 or place in wanted) for place, t in enumerate(called.activations, -1)
    )
    seeded = called.seed is not None
    key: Hashable = (state.key, called.call, layout, called.mode, seeded, lengths, called.autocast)
    with _LOCK:
        TRACES.busy = True
        try:
            made = _found(called, layer, state, key)
            TRACES.users.setdefault(made.number, set()).add(called.word)
            return made, state
        finally:
            TRACES.busy = False
            if _GONE:
                _drop_unused()


def _found(called: Called, layer: Any, state: State, key: Hashable) -> Traced:
    if key in TRACES.numbered:
        key = (key, layer_index.numbers_of(layer))
    changes = []
    for found in TRACES.by_signature.get(key, ()):
        if found.holds(called.activations):
            if (change := found.reads.changed()) is None:
                return found
            changes.append(change)
    if changes:
        _tell_changes(called.word, layer, changes)
    made, key = _made(called, layer, state, key)
    TRACES.by_signature.setdefault(key, []).append(made)
    TRACES.by_number[made.number] = made
    return made


def _tell_changes(word: str, layer: Any, changes: list[str]) -> None:
    """What a layer reads is another value than in each of its traces."""
    if len(changes) >= MOST_CHANGES:
        times = f"what it reads changed {len(changes)} times, at last: {changes[-1]}"
        layer.region_refused = f"{times}; wanted a tensor for what changes"
        raise RuntimeError(f"region {word}: {layer.region_refused}")
    _log.warning("monograph: region %s is traced anew: %s", word, changes[-1])


def _made(called: Called, layer: Any, state: State, key: Hashable) -> tuple[Traced, Hashable]:
    """A new trace and its key, with the layer's number in it if the layer computes with it."""
    layout = layout_of(called.trained)
    if layout.sliced:
        trained = [torch.empty(shape, dtype=torch.float32) for shape in layout.shapes()]
    else:
        trained = [state.tensors[part[0][0]] for part in layout.parts]
    request = Request(
        layer=layer,
        call=called.call,
        layout=layout,
        mode=called.mode,
        activations=[real(t) for t in called.activations],
        seed=None if called.seed is None else real(called.seed),
        trained=trained,
        frozen={name: t for name, t in state.tensors.items() if name not in layout.names},
        autocasts=called.autocast,
    )
    with layer_index.watched(layer) as indexes:
        try:
            made = trace(request, next(_NUMBERS))
        except Exception as error:
            layer.region_refused = str(error)
            kind = type(layer).__name__
            raise RuntimeError(f"region {called.word} ({kind}) cannot be traced: {error}") from error
        used = any(index.used for index in indexes)
    if used and not (isinstance(key, tuple) and key[0] in TRACES.numbered):
        TRACES.numbered.add(key)
        key = (key, layer_index.numbers_of(layer))
    return made, key


def _check(called: Called, state: State, names: frozenset[str]) -> None:
    if state.hooked is not None:
        raise RuntimeError(
            f"region {called.word}: {state.hooked} has a hook that came after the step was compiled, wanted "
            "none; torch.compiler.reset() compiles anew"
        )
    missing = sorted(names - state.tensors.keys())
    extra = sorted(n for n, t in state.tensors.items() if t.requires_grad and n not in names)
    if missing or (extra and called.mode != FORWARD):
        raise RuntimeError(
            f"region {called.word}: the trained parameters are no longer those that the step was compiled "
            f"for: missing {missing[:3]}, new {extra[:3]}; torch.compiler.reset() compiles anew"
        )


def check_parameters(word: str, trained: str, state: State, parameters: Sequence[torch.Tensor]) -> None:
    """A graph hands over the parameters that it was traced with, or copies; the layer may have others now."""
    layout = layout_of(trained)
    if layout.sliced:
        return
    for part, parameter in zip(layout.parts, parameters, strict=True):
        name = part[0][0]
        own = state.tensors[name]
        if own.data_ptr() != parameter.data_ptr() and not torch.equal(own, parameter):
            raise RuntimeError(
                f"region {word}: {name} was replaced after the step was compiled, wanted the same parameter; "
                "torch.compiler.reset() compiles anew"
            )
