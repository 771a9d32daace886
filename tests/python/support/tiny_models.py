"""Small real models: a Llama in memory, and folders for the tests of the native tool."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM


def tiny_llama(*, seed: int | None = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A Llama of two layers with random weights; without a seed, by torch's generator as it stands."""
    settings: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
    }
    if seed is not None:
        torch.manual_seed(seed)
    model: Any = LlamaForCausalLM(LlamaConfig(**(settings | changes)))
    return model.to(dtype)


def llama_config(**changes: Any) -> LlamaConfig:
    settings: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 192,  # bitsandbytes on a CPU wants rows in multiples of 32
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**(settings | changes))


def save_llama(
    folder: pathlib.Path, dtype: torch.dtype = torch.bfloat16, max_shard_size: str = "5GB", **changes: Any
) -> pathlib.Path:
    torch.manual_seed(7)
    model: Any = LlamaForCausalLM(llama_config(**changes))
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 64}\n')
    return folder


def bnb_config(quant_type: str = "nf4", double_quant: bool = True, **changes: Any) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=changes.pop("compute_dtype", torch.bfloat16),
        **changes,
    )


def load(folder: pathlib.Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", **options).eval()


def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(24).reshape(2, 12) * 13 % 320
    with torch.inference_mode():
        return model(input_ids=tokens).logits
