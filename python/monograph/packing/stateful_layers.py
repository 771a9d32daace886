"""Layers that carry state along a row: convolutions and recurrences, most of which know no boundaries.

In a packed row the state of one document would run into the next. Such a row is refused, in eager mode and
inside a graph, unless all layers with state are of kinds that our operators compute, documents apart
(docs/explain/recurrent.md). Rows of one document and padded batches are not concerned.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from monograph.packing.packed_rows_hook import PackedRowsHook, require
from monograph.upstream.instance_class import put_before

# Kinds in `config.layer_types` (`linear_attention`, `conv`, `mamba` ...), and classes. `hybrid`: attention
# and a state space side by side in one layer (Falcon-H1).
_KINDS = re.compile(
    r"hybrid|linear|conv|mamba|recurrent|ssm|rwkv|lightning|delta|lstm|retention", re.IGNORECASE
)
_CLASSES = re.compile(r"mamba|deltanet|deltaattention|rwkv|lstm|lightning|shortconv|rglru|retention", re.I)
_PARAMETERS = {"A_log", "dt_bias", "time_decay", "recurrent_param"}
_TOWERS = re.compile(r"audio|vision|visual|speech")  # their layers run along no text


class KeepsDocumentsApart(nn.Module):
    """Before the class of a layer: it carries state, and begins each document anew."""


class ConfigKnowsBoundaries:
    """Before the class of a config: all layers with state that it speaks of keep documents apart.

    Not an attribute: that would be saved with the config, for layers that do not.
    """


def _stateful(config: Any) -> list[str]:
    if isinstance(config, ConfigKnowsBoundaries):
        return []
    return [kind for kind in getattr(config, "layer_types", None) or () if _KINDS.search(kind)]


def stateful_kinds(config: Any) -> list[str]:
    """The kinds of layers in a transformers config that carry state and may mix documents."""
    return sorted({*_stateful(config), *_stateful(getattr(config, "text_config", None))})


def know_boundaries(model: nn.Module) -> None:
    """Tells the config of a transformers model, if all its layers with state keep documents apart."""
    config: Any = model.config
    stateful = len(_stateful(config))
    if stateful and sum(isinstance(m, KeepsDocumentsApart) for m in model.modules()) >= stateful:
        put_before(ConfigKnowsBoundaries, config)


def stateful_layers(model: nn.Module) -> list[str]:
    """The layers of a model that carry state and may mix documents: what its config says, then what they are
    made of."""
    found = stateful_kinds(getattr(model, "config", None))
    apart = tuple(f"{name}." for name, m in model.named_modules() if isinstance(m, KeepsDocumentsApart))
    for name, module in model.named_modules():
        if f"{name}.".startswith(apart):
            continue
        convolves = (
            isinstance(module, nn.Conv1d)
            and module.kernel_size[0] > 1
            and module.groups == module.in_channels
        )
        owns = any(parameter in _PARAMETERS for parameter, _ in module.named_parameters(recurse=False))
        named = name and _CLASSES.search(type(module).__name__)
        if (convolves or owns or named or isinstance(module, nn.RNNBase)) and not _TOWERS.search(name):
            found.append(f"{name} ({type(module).__name__})")
    return found


def _refusal(layers: Iterable[str], what: str) -> str:
    shown = list(layers)
    more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return (
        f"packed rows ({what}) with layers that carry state along the row: {', '.join(shown[:3])}{more}. The "
        "state of one document would run into the next; wanted one document per row (sample_packing: false, "
        "PaddedCollator)"
    )


def refuse_in_config(config: Any, what: str, whole: torch.Tensor | None = None) -> None:
    """Refuses a packed row by a layer's config. `whole`: bool tensor [], True if the row is one document."""
    kinds = stateful_kinds(config)
    if kinds and whole is None:
        raise ValueError(_refusal(kinds, what))
    if kinds and whole is not None:
        require(whole, _refusal(kinds, what))


def refuse_packed(model: nn.Module, what: str) -> None:
    """Refuses a model that is about to be given packed rows."""
    if layers := stateful_layers(model):
        raise ValueError(_refusal(layers, what))


class _Guard(PackedRowsHook):
    def __init__(self, layers: list[str]) -> None:
        self.layers = layers

    def refusal(self, module: nn.Module, what: str) -> str | None:
        return _refusal(self.layers, what)


def guard_packed(model: nn.Module) -> None:
    """Has every transformers model inside `model` refuse packed rows that it would mix.

    Because of layers with state, or of an attention that reads no boundaries.
    """
    from transformers import PreTrainedModel

    from monograph.packing.unsupported_attention import guard_attention

    layers = stateful_layers(model)
    for module in model.modules() if layers else ():
        if isinstance(module, PreTrainedModel) and "refuses_packed_rows" not in vars(module):
            vars(module)["refuses_packed_rows"] = True
            module.register_forward_pre_hook(_Guard(layers), with_kwargs=True)
    guard_attention(model)
