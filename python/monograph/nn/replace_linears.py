"""Swaps the linear layers of a model for QuantLinear."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from monograph.nn.quant_linear import QuantLinear
from monograph.packed_weight import quantize
from monograph.spellings.bitsandbytes import from_bitsandbytes


def replace_linears(
    model: nn.Module,
    format: str = "nf4",
    *,
    block_size: int | None = None,
    double_quant: bool = False,
    skip: Sequence[str] = (r"lm_head",),
    state: Mapping[str, torch.Tensor] | None = None,
) -> nn.Module:
    """Replaces every nn.Linear whose name matches none of the patterns in `skip`, in place.

    With `state`, a state dict that bitsandbytes wrote, a layer takes its packed bytes from there as they are,
    and a layer that `state` does not hold in 4 bits stays dense. Without it the layer's weight is quantised.
    """
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, nn.Linear) or isinstance(layer, QuantLinear):
            continue
        if any(re.search(pattern, name) for pattern in skip):
            continue
        if state is None:
            packed = quantize(layer.weight, format, block_size=block_size, double_quant=double_quant)
        elif any(key.startswith(f"{name}.weight.quant_state.") for key in state):
            packed = from_bitsandbytes(state, f"{name}.weight")
        else:
            continue
        bias = layer.bias
        if state is not None and f"{name}.bias" in state:
            bias = nn.Parameter(state[f"{name}.bias"])
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, QuantLinear(packed, bias))
    return model
