"""Swaps the linear layers of a model for QuantLinear."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from monograph.nn.linear4bit import is_linear4bit, quant_linear, replace_linear4bit
from monograph.nn.quant_linear import QuantLinear
from monograph.quant.packed_weight import quantize
from monograph.quant.quant_methods.bitsandbytes import from_bitsandbytes


def replace_linears(
    model: nn.Module,
    format: str | None = None,
    *,
    block_size: int | None = None,
    double_quant: bool | None = None,
    skip: Sequence[str] = (r"lm_head",),
    state: Mapping[str, torch.Tensor] | None = None,
) -> nn.Module:
    """Replaces every nn.Linear whose name matches none of the patterns in `skip`, in place.

    With `state`, a state dict that bitsandbytes wrote, a layer takes its packed bytes from there as they are,
    and a layer that `state` does not hold in 4 bits stays dense. Without it the layer's weight is quantised,
    to nf4 unless told otherwise. A 4-bit layer of bitsandbytes keeps its bytes, without a copy; `format`,
    `block_size` and `double_quant` must be its own if given. A model that bitsandbytes quantised is so done
    with `replace_linears(model)`.
    """
    if hasattr(model, "peft_config"):
        raise ValueError(
            f"replace_linears: {type(model).__name__} has adapters of PEFT, which would be packed with the "
            "rest; wanted a model without: call it before get_peft_model, or mg.optimize after it"
        )
    if state is None:
        live = {name: layer for name, layer in _chosen(model, skip).items() if is_linear4bit(layer)}
        for name, layer in live.items():
            _check_asked(
                name, layer, {"format": format, "block_size": block_size, "double_quant": double_quant}
            )
        own = {id(layer) for layer in live.values()}
        replace_linear4bit(model, lambda parent, layer: id(layer) in own)
    for name, layer in _chosen(model, skip).items():
        if state is None:
            packed = quantize(
                layer.weight, format or "nf4", block_size=block_size, double_quant=bool(double_quant)
            )
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


def _chosen(model: nn.Module, skip: Sequence[str]) -> dict[str, nn.Linear]:
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
        and not isinstance(layer, QuantLinear)
        and not any(re.search(pattern, name) for pattern in skip)
    }


def _check_asked(name: str, layer: nn.Module, asked: Mapping[str, Any]) -> None:
    """The bytes of a layer that is packed already are not packed anew."""
    packed = quant_linear(layer, name).packed
    found = {
        "format": packed.format.name,
        "block_size": packed.block_size,
        "double_quant": packed.double_quant,
    }
    for what, wanted in asked.items():
        if wanted is not None and wanted != found[what]:
            raise ValueError(
                f"replace_linears: {what} is {wanted!r} and {name} was quantised by bitsandbytes with "
                f"{found[what]!r}, wanted no {what}: its bytes are taken as they are"
            )
