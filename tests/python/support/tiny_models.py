"""Small real models on disk for the tests of the native tool."""

import pathlib

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM


def llama_config(**changes):
    settings = {
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


def save_llama(folder: pathlib.Path, dtype=torch.bfloat16, max_shard_size="5GB", **changes) -> pathlib.Path:
    torch.manual_seed(7)
    model = LlamaForCausalLM(llama_config(**changes)).to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 64}\n')
    return folder


def bnb_config(quant_type="nf4", double_quant=True, **changes) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=changes.pop("compute_dtype", torch.bfloat16),
        **changes,
    )


def load(folder: pathlib.Path, **options):
    return AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", **options).eval()


def logits(model) -> torch.Tensor:
    tokens = torch.arange(24).reshape(2, 12) * 13 % 320
    with torch.inference_mode():
        return model(input_ids=tokens).logits
