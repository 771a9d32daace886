"""Adapters of every kind that PEFT writes, on tiny real models, for the tests of `monograph adapter`."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support import tiny_experts
from support.merge_reference import adapter_on, base_model

EXPERTS: dict[str, Any] = {
    "target_modules": ["q_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
# Settings of LoraConfig, and of the base where it is not the plain Llama.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ATTENTION},
    "all_linear": {"target_modules": "all-linear"},
    "rslora": {"target_modules": ATTENTION, "use_rslora": True},
    "rank_pattern": {"target_modules": ATTENTION, "rank_pattern": {"v_proj": 4}},
    "alpha_pattern": {"target_modules": ATTENTION, "alpha_pattern": {"v_proj": 4}},
    "layers": {"target_modules": ATTENTION, "layers_to_transform": [1]},
    "dora": {"target_modules": ATTENTION, "use_dora": True},
    "modules_to_save": {"target_modules": ATTENTION, "modules_to_save": ["lm_head"]},
    "embeddings": {"target_modules": ["embed_tokens", "lm_head", *ATTENTION]},
    "tokens": {"target_modules": ATTENTION, "trainable_token_indices": {"embed_tokens": [300, 2]}},
    "lora_bias": {"target_modules": ATTENTION, "lora_bias": True, "attention_bias": True},
    "biases": {"target_modules": ATTENTION, "bias": "lora_only", "attention_bias": True},
    "tied_head": {"target_modules": ["lm_head", *ATTENTION], "tie_word_embeddings": True},
    "regex": {"target_modules": r".*self_attn\.(q|k|v)_proj"},
    "one_of_a_layer": {"target_modules": ["k_proj", "up_proj"]},
}
OF_THE_BASE = ("attention_bias", "tie_word_embeddings")


def saved(kind: str, folder: pathlib.Path, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """The base and the adapter of a kind below `folder`; returns the PEFT model."""
    settings = dict(KINDS[kind]) | more
    model = base_model(torch.float32, **{key: settings.pop(key) for key in OF_THE_BASE if key in settings})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder / "base")
    return adapter_on(model, folder / "adapter", dtype, **settings)


def saved_experts(name: str, folder: pathlib.Path, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """The same of a mixture of experts of tiny_experts, with LoRA on its parameters."""
    model = tiny_experts.model(name, torch.float32)
    model.save_pretrained(folder / "base")
    return adapter_on(model, folder / "adapter", dtype, **(EXPERTS | {"r": 4} | more))


def edit_tensors(folder: pathlib.Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Replaces the tensors of an adapter by change(tensors)."""
    path = folder / "adapter_model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file({name: tensor.contiguous() for name, tensor in change(tensors).items()}, path)


def edit_config(folder: pathlib.Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
