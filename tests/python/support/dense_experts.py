"""The dense copy of a model with packed experts, and how close the two are."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import monograph as mg
from monograph.nn.packed_experts import PackedExperts

CLOSE = {"rtol": 0, "atol": 2e-5}


def dense_copy(folder: str | pathlib.Path, packed: Any) -> Any:
    """The folder on transformers' loop, with the values that the packed model holds."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    for path, layer in packed.named_modules():
        path = path.replace(".base_layer", "")
        if isinstance(layer, mg.nn.QuantLinear):
            model.get_submodule(path).weight.data = layer.dequantize()
        elif isinstance(layer, PackedExperts):
            for name in layer.stacks:
                getattr(model.get_submodule(path), name).data = layer.show(name) + 0
    return model.eval()
