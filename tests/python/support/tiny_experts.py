"""Tiny mixtures of experts as transformers saves them, and their experts stacked with torch."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

COMMON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
}
# Class, settings of its config, where its experts are, whether they are stored [experts, inputs, outputs].
# 160 rows of gate: an FP8 block and a quarter.
MODELS = {
    "qwen3": ("Qwen3Moe", {"moe_intermediate_size": 160, "num_experts": 3, "head_dim": 32}, "mlp.experts"),
    "mixtral": ("Mixtral", {"intermediate_size": 160, "num_local_experts": 3}, "block_sparse_moe.experts"),
    "granite": ("GraniteMoe", {"intermediate_size": 160, "num_local_experts": 3}, "block_sparse_moe"),
    # down_proj is square: only the model says which way it lies.
    "gpt_oss": ("GptOss", {"intermediate_size": 64, "num_local_experts": 3, "head_dim": 32}, "mlp.experts"),
}
LAYER = "model.layers.0."


def model(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    kind, settings, _ = MODELS[name]
    torch.manual_seed(1)
    config = getattr(transformers, kind + "Config")(**COMMON, **settings)
    made = getattr(transformers, kind + "ForCausalLM")(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.05)
    return made.to(dtype)


def save(name: str, folder: pathlib.Path, dtype: torch.dtype = torch.bfloat16) -> pathlib.Path:
    model(name, dtype).save_pretrained(folder)
    return folder


def stacks(folder: pathlib.Path, name: str) -> dict[str, torch.Tensor]:
    """[experts, outputs, inputs] by the name that a stacked folder has for them."""
    where = LAYER + MODELS[name][2]
    state = load_file(folder / "model.safetensors")
    if name == "gpt_oss":
        return {
            f"{where}.{key}": state[f"{where}.{key}"].transpose(1, 2).contiguous()
            for key in ("gate_up_proj", "down_proj")
        }
    if name == "granite":
        names = [f"{where}.input_linear.weight", f"{where}.output_linear.weight"]
        return {key: state[key] for key in names}
    gate, up, down = ("w1", "w3", "w2") if name == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    found = {key: value for key, value in state.items() if re.search(r"experts\.\d+\.", key)}

    def stacked(projection: str) -> torch.Tensor:
        return torch.stack([found[f"{where}.{e}.{projection}.weight"] for e in range(3)])

    return {
        f"{where}.gate_up_proj": torch.cat([stacked(gate), stacked(up)], 1),
        f"{where}.down_proj": stacked(down),
    }


def stacks_names(name: str) -> list[str]:
    """Gate and up, then down, as a stacked folder has them."""
    where = LAYER + MODELS[name][2]
    if name == "granite":
        return [f"{where}.input_linear.weight", f"{where}.output_linear.weight"]
    return [f"{where}.gate_up_proj", f"{where}.down_proj"]


def is_expert(key: str) -> bool:
    return ("experts." in key or "_linear." in key) and not key.endswith("_bias")
