"""Decoder layers whose Python code does what a trace cannot hold: state, globals, draws. One function each.

`FEATURES` has them by name: what a layer does with x, and what changes between two steps. A run gives the
bits of every step, or the refusal of a region.
"""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import functools
import itertools
import os
import random
import time
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from monograph.training.regions import make_regions

Apply = Callable[[Any, torch.Tensor, dict[str, Any]], torch.Tensor]
Change = Callable[[Any, float], Any]


@dataclasses.dataclass(frozen=True)
class Feature:
    """refused: "" if a region must have the bits of the layer, else words of its refusal."""

    apply: Apply
    change: Change = lambda model, value: None
    refused: str = ""


FEATURES: dict[str, Feature] = {}
GAIN = 1.0
GAINS = [1.0]
COUNTS = {"calls": 0}
ARRAY = numpy.ones(2)
NAMES = {"even"}
SETTINGS = types.ModuleType("odd_settings")
VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("gain", default=1.0)
SCALES = torch.ones(2)


class Slotted:
    __slots__ = ("gain",)
    gain: float


class Chain:
    def __init__(self) -> None:
        self.inner = types.SimpleNamespace(gain=1.0, others=[1.0, {"deep": 1.0}])

    def value(self) -> float:
        return self.inner.gain * self.inner.others[1]["deep"]


@dataclasses.dataclass
class Options:
    gain: float = 1.0


class Shared:
    gain = 1.0
    calls = 0


CHAIN = Chain()


@functools.lru_cache(maxsize=1)
def options() -> Options:
    return Options()


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * 1.5


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2.5


HELPERS = {"scale": scaled}
scale_now = scaled


class ByGlobal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy * GAINS[0]


class Counting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        COUNTS["calls"] += 1
        return dy


def counter() -> Callable[[], int]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


def adjustable() -> tuple[Callable[[], float], Callable[[float], None]]:
    gain = 1.0

    def read() -> float:
        return gain

    def write(value: float) -> None:
        nonlocal gain
        gain = value

    return read, write


class OddLayer(GradientCheckpointingLayer):
    def __init__(self, features: list[str], config: Any) -> None:
        super().__init__()
        self.linear, self.config, self.features = nn.Linear(8, 8), config, features
        self.register_buffer("ema", torch.zeros(()))
        self.trace, self.plain, self.gain, self.n = torch.zeros(()), torch.ones(()), 1.0, 0
        self.log, self.space, self.rng = [1.0], types.SimpleNamespace(gain=1.0), random.Random(3)
        self.draw = self.rng.random
        if "iterator" in features:
            self.numbers = itertools.count()
        self.generator, self.count, self.slotted = numpy.random.default_rng(3), counter(), Slotted()
        self.read, self.write = adjustable()
        self.slotted.gain, self.others = 1.0, {"gain": [1.0]}
        self.ref, self.recent = weakref.ref(CHAIN), collections.deque([1.0], maxlen=2)

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        x = torch.tanh(self.linear(hidden_states))
        for name in self.features:  # a layer of several odd parts
            x = FEATURES[name].apply(self, x, options)
        return hidden_states + x


class OddModel(nn.Module):
    def __init__(self, features: list[str], layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = types.SimpleNamespace(gain=1.0, table={"gain": 1.0}, unread=0)
        self.options: dict[str, Any] = {"scale": 1.0, "seen": {}}
        self.layers = nn.ModuleList(OddLayer(features, self.config) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, **self.options)
        return x.square().mean()


def reset() -> None:
    """All that is global as it was at first."""
    global GAIN, scale_now
    GAIN, scale_now = 1.0, scaled
    GAINS[:], HELPERS["scale"] = [1.0], scaled
    COUNTS["calls"] = Shared.calls = 0
    Shared.gain, SETTINGS.GAIN = 1.0, 1.0  # type: ignore[attr-defined]
    CHAIN.inner = types.SimpleNamespace(gain=1.0, others=[1.0, {"deep": 1.0}])
    ARRAY[:] = 1
    SCALES.fill_(1)
    NAMES.clear()
    NAMES.add("even")
    options().gain = 1.0
    VARIABLE.set(1.0)
    os.environ["ODD_GAIN"] = "1.0"
    OddLayer.bias = 0.5  # type: ignore[attr-defined]
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def run(
    features: list[str], regions: bool, changed: list[list[str]], checkpointing: bool = False
) -> list[Any]:
    """The loss and gradients of each step; before it the features of `changed` change what they read. Ends
    with the text of an error."""
    reset()
    try:
        return _run(features, regions, changed, checkpointing)
    finally:
        torch.set_default_dtype(torch.float32)


def _run(features: list[str], regions: bool, changed: list[list[str]], checkpointing: bool) -> list[Any]:
    model = OddModel(features)
    if checkpointing:
        for layer in map(_anything, model.layers):
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = functools.partial(
                torch.utils.checkpoint.checkpoint, use_reentrant=False
            )
    if regions:
        make_regions(model)
    found: list[Any] = []
    for step, names in enumerate([[], *changed]):
        for name in names:
            FEATURES[name].change(model, 1.0 + 0.5 * (step % 3))
        x = torch.linspace(-1, 1, 48, dtype=torch.float32).reshape(2, 3, 8) + step
        try:
            loss = model(x)
            gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        except RuntimeError as error:
            if not regions:
                raise
            return [*found, str(error)]
        found.append([loss.item(), *(None if g is None else g.tolist() for g in gradients), state(model)])
    return found


def _anything(layer: Any) -> Any:
    return layer


def state(model: OddModel) -> list[Any]:
    """What layers and globals hold."""
    own = [(v.n, float(v.ema), list(v.log), list(v.recent), v.rng.getstate()[1][-1]) for v in model.layers]  # type: ignore[operator, arg-type, union-attr]
    return [own, dict(COUNTS), Shared.calls, random.getstate()[1][-1], numpy.random.get_state()[2]]  # type: ignore[index]


def counted(layer: Any, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    layer.n += 1
    return x * (1 + 0.1 * layer.n)


def averaged(layer: Any, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    layer.ema = layer.ema * 0.5 + x.detach().mean()
    return x * (1 + layer.ema)


def averaged_in_place(layer: Any, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    layer.ema.mul_(0.5).add_(x.detach().mean())
    return x * (1 + layer.ema)


def plain_tensor(layer: Any, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    layer.trace = layer.trace * 0.5 + x.detach().mean()
    return x * (1 + layer.trace)


def remembers(layer: Any, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    if (last := getattr(layer, "last", None)) is not None:
        x = x + 0.1 * last.mean()
    layer.last = x.detach()
    return x


def logs(layer: Any, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    layer.log.append(2.0)
    return x * len(layer.log)


def nested_log(layer: Any, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    layer.others["gain"][0] += 1.0
    return x * layer.others["gain"][0]


def counts_globally(layer: Any, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    COUNTS["calls"] += 1
    return x * COUNTS["calls"]


def counts_in_class(layer: Any, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    Shared.calls += 1
    return x * Shared.calls


def sets_global(layer: Any, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    global GAIN
    GAIN = GAIN * 1.5
    return x * GAIN


def changes_namespace(layer: Any, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    layer.space.gain *= 1.5
    return x * layer.space.gain


def changes_chain(layer: Any, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    inner = CHAIN.inner
    inner.others[1]["deep"] += 1.0
    return x * CHAIN.value()


def writes_into_options(layer: Any, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    options["seen"]["calls"] = options["seen"].get("calls", 0) + 1
    return x * options["seen"]["calls"]


def own_containers(layer: Any, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """All of this is made by the call itself."""
    parts: list[torch.Tensor] = []
    seen = {"calls": 0}

    def add(part: torch.Tensor) -> None:
        parts.append(part)
        seen["calls"] += 1

    for part in x.chunk(2, dim=-1):
        add(part)
    options["own"] = Options(gain=2.0)
    options["own"].gain += seen["calls"]
    return torch.cat(parts, dim=-1) * options["own"].gain


def hooked_gradient(layer: Any, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    x = x * 1.0
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * GAINS[0])
    return x


def add_hook(model: Any, value: float) -> None:
    model.layers[1].linear.register_forward_hook(lambda module, given, result: result * value)


def set_global(model: Any, value: float) -> None:
    global GAIN
    GAIN = value


def replace_helper(model: Any, value: float) -> None:
    global scale_now
    scale_now = doubled if value > 1.2 else scaled


def set_names(model: Any, value: float) -> None:
    NAMES.add("odd") if value > 1.2 else NAMES.discard("odd")


def of_layer(name: str) -> Change:
    return lambda model, value: setattr(model.layers[0], name, value)


def same_for(target: Any, name: str) -> Change:
    return lambda model, value: setattr(target, name, value)


def put(target: Any, place: Any) -> Callable[[Any, Any], Any]:
    return lambda model, value: target.__setitem__(place, value)


FEATURES.update(
    {
        "attribute": Feature(lambda layer, x, options: x * layer.gain, of_layer("gain")),
        "attribute's type": Feature(
            lambda layer, x, options: x if layer.gain is True else x * 2,
            lambda model, value: setattr(model.layers[0], "gain", True if value > 1.2 else 1),
        ),
        "buffer": Feature(
            lambda layer, x, options: x * (2 + layer.ema), lambda m, v: m.layers[0].ema.fill_(v)
        ),
        "list": Feature(
            lambda layer, x, options: x * layer.log[0], lambda m, v: put(m.layers[0].log, 0)(m, v)
        ),
        "deque": Feature(
            lambda layer, x, options: x * layer.recent[0], lambda m, v: m.layers[0].recent.appendleft(v)
        ),
        "namespace": Feature(
            lambda layer, x, options: x * layer.space.gain, lambda m, v: setattr(m.layers[0].space, "gain", v)
        ),
        "slots": Feature(
            lambda layer, x, options: x * layer.slotted.gain,
            lambda m, v: setattr(m.layers[1].slotted, "gain", v),
        ),
        "config": Feature(
            lambda layer, x, options: x * layer.config.gain, lambda m, v: setattr(m.config, "gain", v)
        ),
        "branch": Feature(
            lambda layer, x, options: (
                x if layer.config.gain < 1.2 else torch.sin(torch.cos(x) * torch.exp(x))
            ),
            lambda m, v: setattr(m.config, "gain", v),
        ),
        "config's table": Feature(
            lambda layer, x, options: x * layer.config.table["gain"],
            lambda m, v: put(m.config.table, "gain")(m, v),
        ),
        "config by string": Feature(
            lambda layer, x, options: x * getattr(layer.config, "ga" + "in"[:2]),
            lambda m, v: setattr(m.config, "gain", v),
        ),
        "class attribute": Feature(lambda layer, x, options: x + layer.bias, same_for(OddLayer, "bias")),
        "another class": Feature(lambda layer, x, options: x * Shared.gain, same_for(Shared, "gain")),
        "global": Feature(lambda layer, x, options: x * GAIN, set_global),
        "global list": Feature(lambda layer, x, options: x * GAINS[0], put(GAINS, 0)),
        "global set": Feature(lambda layer, x, options: x * (2 if "odd" in NAMES else 1), set_names),
        "global array": Feature(lambda layer, x, options: x * float(ARRAY[0]), put(ARRAY, 0)),
        "global object": Feature(
            lambda layer, x, options: x * CHAIN.value(), lambda m, v: setattr(CHAIN.inner, "gain", v)
        ),
        "deep in it": Feature(
            lambda layer, x, options: x * CHAIN.value(), lambda m, v: put(CHAIN.inner.others[1], "deep")(m, v)
        ),
        "behind a weak reference": Feature(
            lambda layer, x, options: x * layer.ref().inner.gain, lambda m, v: setattr(CHAIN.inner, "gain", v)
        ),
        "cached object": Feature(
            lambda layer, x, given: x * options().gain, lambda m, v: setattr(options(), "gain", v)
        ),
        "module": Feature(lambda layer, x, options: x * SETTINGS.GAIN, same_for(SETTINGS, "GAIN")),
        "helper": Feature(lambda layer, x, options: scale_now(x), replace_helper),
        "helper in a table": Feature(
            lambda layer, x, options: HELPERS["scale"](x),
            lambda m, v: put(HELPERS, "scale")(m, doubled if v > 1.2 else scaled),
        ),
        "closure": Feature(lambda layer, x, options: x * layer.read(), lambda m, v: m.layers[0].write(v)),
        "context variable": Feature(
            lambda layer, x, options: x * VARIABLE.get(), lambda m, v: VARIABLE.set(v)
        ),
        "environment": Feature(
            lambda layer, x, options: x * float(os.environ["ODD_GAIN"]),
            lambda m, v: os.environ.__setitem__("ODD_GAIN", str(v)),
        ),
        "default dtype": Feature(
            lambda layer, x, options: x * torch.tensor(1 / 3).to(torch.float32),
            lambda m, v: torch.set_default_dtype(torch.float64 if v > 1.2 else torch.float32),
        ),
        "gradient by a global": Feature(lambda layer, x, options: ByGlobal.apply(x), put(GAINS, 0)),
        "gradient by a hook": Feature(hooked_gradient, put(GAINS, 0)),
        "option": Feature(
            lambda layer, x, options: x * options["scale"], lambda m, v: m.options.__setitem__("scale", v)
        ),
        "training": Feature(
            lambda layer, x, options: x * (2 if layer.training else 1), lambda m, v: m.train(v > 1.2)
        ),
        "a hook": Feature(lambda layer, x, options: x, add_hook),
        "own containers": Feature(own_containers),
        "own in place": Feature(lambda layer, x, options: (x * 2).mul_(3).add_(1)),
        "unread": Feature(lambda layer, x, options: x, lambda m, v: setattr(m.config, "unread", v)),
        "counter": Feature(counted, refused="assigns the layer.n"),
        "average": Feature(averaged, refused="assigns the layer.ema"),
        "average in place": Feature(averaged_in_place, refused="in place"),
        "tensor": Feature(plain_tensor, refused="assigns the layer.trace"),
        "memory": Feature(remembers, refused="assigns the layer.last"),
        "log": Feature(logs, refused="assigns log"),
        "nested log": Feature(nested_log, refused="assigns others"),
        "global counter": Feature(counts_globally, refused=r"assigns .*COUNTS\['calls'\]"),
        "class counter": Feature(counts_in_class, refused="assigns Shared.calls"),
        "set global": Feature(sets_global, refused="assigns .*odd_layers.GAIN"),
        "set namespace": Feature(changes_namespace, refused="assigns space.gain"),
        "set in a chain": Feature(changes_chain, refused=r"assigns .*\['deep'\]"),
        "closure's counter": Feature(
            lambda layer, x, options: x * layer.count(), refused="assigns count: calls"
        ),
        "counter in backward": Feature(
            lambda layer, x, options: Counting.apply(x), refused=r"COUNTS\['calls'\]"
        ),
        "random": Feature(lambda layer, x, options: x * random.random(), refused="Python's generator"),
        "numpy.random": Feature(
            lambda layer, x, options: x * float(numpy.random.rand()), refused="NumPy's generator"
        ),
        "own generator": Feature(
            lambda layer, x, options: x * layer.rng.random(), refused="the generator rng"
        ),
        "own NumPy generator": Feature(
            lambda layer, x, options: x * float(layer.generator.random()), refused="the generator generator"
        ),
        "method of a generator": Feature(lambda layer, x, options: x * layer.draw(), refused="the generator"),
        "torch.rand": Feature(lambda layer, x, options: x * torch.rand(()), refused="draws random numbers"),
        "torch's seed": Feature(
            lambda layer, x, options: x * (1 if torch.manual_seed(5) else 2), refused="torch's generator"
        ),
        "iterator": Feature(lambda layer, x, options: x * next(layer.numbers), refused="iterator .*numbers"),
        "clock": Feature(
            lambda layer, x, options: x * (time.time() % 7), refused=r"reads the clock \(time.time\)"
        ),
        "prints": Feature(lambda layer, x, options: (print(end=""), x)[1], refused="it prints"),
        "global tensor": Feature(
            lambda layer, x, options: x * SCALES[0], lambda m, v: SCALES.fill_(v), refused="FakeTensor"
        ),
        "option written": Feature(writes_into_options, refused="writes into seen"),
    }
)
