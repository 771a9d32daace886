"""A layer as a function of its tensors: what is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.func import functional_call

from monograph.ops.seeded_dropout import SeededDropout, seeded_dropout
from monograph.training.regions import shared_kv
from monograph.training.regions.call import put_together
from monograph.training.regions.held import Held
from monograph.training.regions.trained import Layout
from monograph.upstream.torch_names import buffers_of, children, hooks, parameters_of


@dataclass(frozen=True)
class Request:
    """All that a trace is made from. `seed` is None if nothing drops. Tensors are real; of activations only
    the shapes count."""

    layer: nn.Module
    call: str
    layout: Layout
    mode: str
    activations: list[torch.Tensor]  # the hidden states first
    seed: torch.Tensor | None
    trained: list[torch.Tensor]
    frozen: dict[str, torch.Tensor]
    autocasts: str  # the dtype that torch.autocast casts to, "" if it is off

    def autocast(self) -> torch.autocast:
        dtype = getattr(torch, self.autocasts) if self.autocasts else None
        return torch.autocast(self.activations[0].device.type, dtype=dtype, enabled=dtype is not None)


class _Body(nn.Module):
    """The forward of the layer's own class, whose tensors `functional_call` can replace."""

    def __init__(self, layer: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.own = layer, forward

    def forward(self, args: Any, kwargs: Any) -> Any:
        held = [one for path, module in self.layer.named_modules() for one in _attributes(path, module)]
        given = [Held(name, value) for name, value in kwargs.items() if isinstance(value, dict)]
        try:
            result = self.own(self.layer, *args, **kwargs)
            assigned = [name for one in held for name in one.changed()]
            written = [one.label for one in given if one.label != shared_kv.KEYWORD and any(one.changed())]
        finally:
            for one in held:
                one.put_back()
        if assigned or written:
            changed = [*(f"assigns {name}" for name in assigned), *(f"writes into {n}" for n in written)]
            raise ValueError(f"it {', '.join(changed[:3])}, which a region would lose")
        return result


def _attributes(path: str, module: nn.Module) -> Iterator[Held]:
    """All that a module has, its tensors and children among it."""
    for names in (vars(module), parameters_of(module), buffers_of(module), children(module), *hooks(module)):
        yield Held(path or "the layer", names, attributes=True)


@contextmanager
def _replaced(places: Sequence[tuple[nn.Module, str, Any]]) -> Iterator[None]:
    """Attributes that are neither parameters nor buffers have other values."""
    before = [vars(module).get(name, _Body) for module, name, _ in places]
    try:
        for module, name, value in places:
            vars(module)[name] = value
        yield
    finally:
        for (module, name, _), value in zip(places, before, strict=True):
            if value is _Body:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = value


def returned_beside(layer: nn.Module) -> int:
    """How many tensors the forward of a layer returns behind the hidden states (router_logits.py)."""
    return getattr(layer, "gives_beside", 0)


def beside(layer: nn.Module) -> int:
    """How many tensors a region gives behind the hidden states: those, then keys and values for others."""
    return returned_beside(layer) + (shared_kv.STORED if shared_kv.stored_type(layer) else 0)


def run(request: Request, activations: Any, seed: Any, trained: Any, frozen: Any) -> list[torch.Tensor]:
    """The layer as a function of its tensors; dropouts draw from `seed`."""
    layer = request.layer
    args, kwargs = put_together(request.call, list(activations))
    named = request.layout.parameters(trained) | dict(zip(request.frozen, frozen, strict=True))
    modules = dict(layer.named_modules())
    plain: list[tuple[nn.Module, str, Any]] = []
    swapped: dict[str, torch.Tensor] = {}
    for name, tensor in named.items():
        path, _, last = name.rpartition(".")
        if last in vars(modules[path]):
            plain.append((modules[path], last, tensor))
        else:
            swapped[f"layer.{name}"] = tensor
    for stream, module in enumerate(m for m in modules.values() if isinstance(m, nn.Dropout)):
        if isinstance(module, SeededDropout):
            plain.append((module, "seed", seed))
        elif module.training and module.p > 0:
            plain.append((module, "forward", _seeded(seed, stream, module.p)))
    # The operator is told by its mode; the layer's own checkpoint would be traced, too.
    plain.append((layer, "gradient_checkpointing", False))
    with _replaced(plain):
        output = functional_call(
            _Body(layer, cast(Any, layer.region_forward)), swapped, (args, kwargs), tie_weights=False
        )
    outputs = list(output) if returned_beside(layer) and isinstance(output, tuple) else [output]
    if len(outputs) != 1 + returned_beside(layer) or not all(
        isinstance(one, torch.Tensor) for one in outputs
    ):
        raise ValueError(f"it returns {type(output).__name__}, wanted a tensor")
    if kind := shared_kv.stored_type(layer):
        outputs += (kwargs.get(shared_kv.KEYWORD) or {}).get(kind, ())
    if len(outputs) != 1 + beside(layer):
        raise ValueError(f"it stores {len(outputs) - 1} tensors for other layers, wanted {beside(layer)}")
    return outputs


def _seeded(seed: torch.Tensor, stream: int, probability: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: seeded_dropout(x.contiguous(), seed, stream, probability)
