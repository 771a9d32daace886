"""Tiny models with recurrent layers, with random weights: one per family that our operators compute."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
FAMILIES = ["qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "lfm2"]


def _options(layers: int, kind: str = "linear_attention") -> dict[str, Any]:
    types = [kind if i % 4 != 3 else "full_attention" for i in range(layers)]
    types[-1] = "full_attention"
    return SMALL | {"num_hidden_layers": layers, "layer_types": types}


def build(family: str, layers: int = 2, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    torch.manual_seed(0)
    options = _options(layers, "conv" if family == "lfm2" else "linear_attention") | more
    model: Any
    if family == "lfm2":
        model = Lfm2ForCausalLM(Lfm2Config(**options, conv_bias=True))
    elif family == "olmo_hybrid":
        model = OlmoHybridForCausalLM(OlmoHybridConfig(**options, **DELTA, linear_allow_neg_eigval=True))
    elif family == "qwen3_next":
        model = Qwen3NextForCausalLM(Qwen3NextConfig(**DELTA, **MOE, head_dim=16, **options))
    elif family == "qwen3_5":
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**options, **DELTA, head_dim=16))
    else:
        config = Qwen3_5MoeTextConfig(**options, **DELTA, **MOE, head_dim=16)
        model = Qwen3_5MoeForCausalLM(config)
    for name, parameter in model.named_parameters():  # gates and decays that matter
        if "norm" not in name and "A_log" not in name and "dt_bias" not in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.to(dtype)
