"""Tiny models of each family with LoRA, and batches for their steps."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from peft import LoraConfig
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import monograph as mg
from monograph.nn import replace_linears
from monograph.ops.formats import ABSMAX_FORMATS
from monograph.packing import PackedCollator, PaddedCollator

SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
}
FAMILIES: dict[str, Any] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, {"sliding_window": 16, "final_logit_softcapping": 5.0}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 16}),
}


def from_folder(model: Any, format: str) -> Any:
    """Saved, quantised while loading, saved, and mapped from that folder."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(f"{folder}/dense")
        mg.from_pretrained(f"{folder}/dense", mg.MonographConfig(format)).save_pretrained(f"{folder}/packed")
        return mg.from_pretrained(f"{folder}/packed")


def build(
    family: str = "llama",
    checkpointing: bool = False,
    dropout: float = 0.0,
    dora: bool = False,
    format: str = "nf4",
    nested: bool = False,
    rank: int = 8,
) -> Any:
    config_class, model_class, options = FAMILIES[family]
    torch.manual_seed(0)
    model = model_class(config_class(**SMALL, **options)).to(torch.bfloat16)
    if format in ABSMAX_FORMATS:
        replace_linears(model, format, double_quant=nested)
    else:
        model = from_folder(model, format)
    if checkpointing:
        model.gradient_checkpointing_enable()
    config = LoraConfig(r=rank, target_modules="all-linear", lora_dropout=dropout, use_dora=dora)
    return mg.add_lora(model, config)


def batches(packed: bool, count: int = 8, seed: int = 1) -> list[dict[str, Any]]:
    """Batches of different lengths; the last has one document."""
    generator = torch.Generator().manual_seed(seed)
    collate = PackedCollator(max_documents=8) if packed else PaddedCollator()
    found = []
    for number in range(count):
        documents = 1 if number == count - 1 else 3 + number % 3
        lengths = torch.randint(4, 40, (documents,), generator=generator).tolist()
        ids = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]
        found.append(collate([{"input_ids": row} for row in ids]))
    return found
