"""What ranks must change alike between two steps, as numbers that they exchange with each step.

The sums of a step are the same on all ranks, whatever each of them adds: a change of one rank's model alone
would go into the update of all. Looked at are the numbers that a forward computes with and the frozen
parameters' memory and dtype; no tensor is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from monograph.nn.adapter_state import adapter_layers, constants
from monograph.training.loss import logits_map
from monograph.upstream.torch_names import parameters_of
from monograph.upstream.transformers_names import attn_implementation_of

Named = Sequence[tuple[str, nn.Module]]
_EPSILONS = ("variance_epsilon", "eps")  # of norms, as transformers and torch call them


class SameOnRanks:
    """Of a model as it is now: what is put into frozen parameters later is what is compared."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._found = {name: (p.data_ptr(), p.dtype) for name, p in _frozen(list(model.named_modules()))}
        self._last: dict[str, tuple[object, int]] = {}

    def numbers(self, named: Named) -> dict[str, int]:
        """By what they say. named: the modules of the model at present."""
        return {
            "adapters: scaling, active and merged ones (hash)": self._hash("adapters", _adapters(named)),
            "dropout, eps, attention and logits (hash)": self._hash("numbers", self._constants(named)),
            "frozen parameters that were replaced since the step was made (hash)": self._hash(
                "frozen", self._replaced(named)
            ),
        }

    def _hash(self, what: str, value: object) -> int:
        """Below 2^63; of the same value it is not computed again."""
        before = self._last.get(what)
        if before is None or before[0] != value:
            digest = hashlib.sha256(repr(value).encode()).digest()
            before = self._last[what] = value, int.from_bytes(digest[:8], "little") >> 1
        return before[1]

    def _replaced(self, named: Named) -> list[tuple[str, torch.dtype]]:
        known = self._found
        return [
            (name, p.dtype)
            for name, p in _frozen(named)
            if name in known and known[name] != (p.data_ptr(), p.dtype)
        ]

    def _constants(self, named: Named) -> list[Any]:
        found: list[Any] = []
        for path, module in named:
            attributes = vars(module)
            if isinstance(module, nn.Dropout):
                found.append((path, module.p))
            found += [(path, attributes[name]) for name in _EPSILONS if type(attributes.get(name)) is float]
        config: Any = getattr(self._model, "config", None)
        if hasattr(config, "get_text_config"):
            found.append((logits_map(config), attn_implementation_of(config.get_text_config())))
        return found


def _adapters(named: Named) -> list[Any]:
    """Without those that are off."""
    found = []
    for path, layer in adapter_layers(named):
        scaling, active, *rest = constants(layer)
        own = [pair for pair in scaling if pair[0] in active] if isinstance(scaling, tuple) else scaling
        if own:
            found.append((path, own, active, *rest))
    return found


def _frozen(named: Named) -> list[tuple[str, nn.Parameter]]:
    """Plain ones: a shard is another on each rank."""
    return [
        (f"{path}.{name}", p)
        for path, module in named
        for name, p in parameters_of(module).items()
        if type(p) is nn.Parameter and not p.requires_grad and not p.is_meta
    ]
