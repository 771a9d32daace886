"""PEFT's configuration for parameters of experts, and the scaled start of their adapters."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig

TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def config(targets: list[str] = TARGETS, **changes: Any) -> LoraConfig:
    options: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": [], "target_parameters": targets}
    return LoraConfig(**(options | {"init_lora_weights": False} | changes))


def scaled(model: Any) -> Any:
    """Factors small enough for a change of the logits by some percent."""
    torch.manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.05)
    return model
