"""The 4-bit layers of a bitsandbytes model in memory as QuantLinear, on the same bytes.

bitsandbytes is not imported: a model that has its layers has imported it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from monograph.nn.quant_linear import QuantLinear
from monograph.quant.quant_methods.bitsandbytes import from_quant_state


def is_linear4bit(layer: nn.Module) -> bool:
    """Whether it is bitsandbytes' layer and its weight was quantised: before that it is an ordinary one."""
    library: Any = sys.modules.get("bitsandbytes.nn")
    return library is not None and isinstance(layer, library.Linear4bit) and _state(layer) is not None


def _state(layer: Any) -> Any:
    # FSDP and others put a plain parameter in the place of Params4bit; the layer knows the state as well.
    found = getattr(layer.weight, "quant_state", None)
    return getattr(layer, "quant_state", None) if found is None else found


def quant_linear(layer: Any, name: str) -> QuantLinear:
    """The layer on the same bytes. `compute_dtype` is left out: a QuantLinear computes in its input's."""
    try:
        packed = from_quant_state(layer.weight, _state(layer))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    wanted = (layer.out_features, layer.in_features)
    if packed.shape != wanted:
        raise ValueError(f"{name}: the packed weight has shape {packed.shape}, wanted {wanted}")
    made = QuantLinear(packed, layer.bias)
    return made.train(layer.training)


def replace_linear4bit(model: nn.Module, may_replace: Callable[[nn.Module, nn.Module], bool]) -> int:
    """Puts a QuantLinear in the place of each, wherever `may_replace(parent, layer)`; says how many.

    All of them are read before the first is replaced: a model is changed whole or not at all. A transformers
    model is saved as before, with bitsandbytes' keys and config.
    """
    made: dict[int, QuantLinear] = {}
    places: list[tuple[nn.Module, str, QuantLinear]] = []
    for name, layer in model.named_modules(remove_duplicate=False):
        if not is_linear4bit(layer):
            continue
        path, _, child = name.rpartition(".")
        parent = model.get_submodule(path)
        if not may_replace(parent, layer):
            continue
        if id(layer) not in made:
            made[id(layer)] = quant_linear(layer, name)
        places.append((parent, child, made[id(layer)]))
    for parent, child, layer in places:
        setattr(parent, child, layer)
    if made and (quantized := [m for m in model.modules() if getattr(m, "hf_quantizer", None) is not None]):
        # By name: transformers' side stands above this room, and such a model has loaded it.
        quantizer = importlib.import_module("monograph.hf.transformers.quantizer")
        for owner in quantized:
            quantizer.save_as_bitsandbytes(owner)
    return len(made)
