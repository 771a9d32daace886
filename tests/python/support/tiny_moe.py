"""Small models with experts, of real config classes with random weights."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
_INNER, _DENSE = {"moe_intermediate_size": 32}, {"intermediate_size": 64}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3_moe": (Qwen3MoeConfig, {"head_dim": 16, "num_experts": 8, **_INNER, **_DENSE}),
    "gpt_oss": (
        GptOssConfig,
        {"head_dim": 16, "num_local_experts": 4, "intermediate_size": 32, "sliding_window": 16},
    ),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "intermediate_size": 32}),
    "olmoe": (OlmoeConfig, {"num_experts": 8, "intermediate_size": 32}),
    "deepseek_v3": (
        DeepseekV3Config,
        {"first_k_dense_replace": 1, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "v_head_dim": 16}
        | {**_LATENT, **_INNER, **_DENSE, "num_key_value_heads": 4},
    ),
    "glm4_moe": (
        Glm4MoeConfig,
        {"head_dim": 16, "n_routed_experts": 8, "first_k_dense_replace": 1, **_INNER, **_DENSE},
    ),
    "qwen3_next": (
        Qwen3NextConfig,
        {"head_dim": 16, "num_experts": 8, "shared_expert_intermediate_size": 32, **_INNER, **_DENSE},
    ),
    "granitemoe": (GraniteMoeConfig, {"num_local_experts": 4, "intermediate_size": 32}),
}


def tiny_config(family: str, layers: int = 2, **changes: Any) -> Any:
    kind, own = FAMILIES[family]
    if family == "qwen3_next":  # its experts alone; recurrent layers are another matter
        own = {**own, "layer_types": ["full_attention"] * layers}
    return kind(**(SIZES | own | {"num_hidden_layers": layers} | changes))


def tiny_model(family: str, dtype: torch.dtype = torch.float32, layers: int = 2, **changes: Any) -> Any:
    """Weights large enough for every expert to matter."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(tiny_config(family, layers, **changes), dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name or "router" in name or "gate" in name:
                parameter.normal_(std=0.15)
    return model.eval()


def save_tiny(folder: pathlib.Path, family: str, **options: Any) -> pathlib.Path:
    tiny_model(family, **options).save_pretrained(folder)
    return folder


def tokens(rows: int = 2, length: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(seed))
