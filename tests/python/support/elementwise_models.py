"""Tiny models whose norms, activations and rotary positions our operators take over."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
IDS = torch.arange(24).reshape(2, 12) * 7 % 64


def build(
    config_class: type[PretrainedConfig] = LlamaConfig, dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config_class(**(SMALL | changes))).to(dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.add_(0.2 * torch.randn(parameter.shape).to(dtype))
    return model
