"""Adapters of random numbers on the decoded model of a GGUF file."""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import torch
from peft import LoraConfig, get_peft_model


def adapter_on(decoded: Any, place: pathlib.Path, strength: float = 0.02, **config: Any) -> pathlib.Path:
    """A LoRA whose changes have this share of each weight's length."""
    torch.manual_seed(5)
    settings: dict[str, Any] = {"r": 8, "target_modules": "all-linear"} | config
    model: Any = get_peft_model(copy.deepcopy(decoded), LoraConfig(**settings))
    with torch.no_grad():
        for module in model.modules():
            if not hasattr(module, "lora_B") or not len(module.lora_B):
                continue
            a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
            b.copy_(torch.randn_like(b))
            b.mul_(strength * module.base_layer.weight.norm() / ((b @ a).norm() * module.scaling["default"]))
    model.save_pretrained(place)
    return place
