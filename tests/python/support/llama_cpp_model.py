"""A transformers model as a GGUF file that llama.cpp runs, written with PyPI's gguf.

The order of rows for the rotary embedding of Llama is made by torch, not by our C++.
"""

from __future__ import annotations

import pathlib
from typing import Any

import gguf
import numpy as np
import torch

from support.gguf_by_package import gpt_oss_tensors
from support.gguf_files import write_out

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
PHI_NAMES = NAMES | {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
GPT_OSS_NAMES = NAMES | {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"}
# Gemma 3 has norms behind its blocks too.
GEMMA_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3", "phi3": "phi3", "gpt_oss": "gpt-oss",
}  # fmt: skip


def turned(weight: torch.Tensor, heads: int) -> torch.Tensor:
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def tensors(model: Any) -> dict[str, np.ndarray]:
    config = model.config
    own = {"gemma3_text": GEMMA_NAMES, "gpt_oss": GPT_OSS_NAMES, "phi3": PHI_NAMES}
    names = own.get(config.model_type, NAMES)
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach().float()
        if config.model_type == "gemma3_text" and "norm" in name:
            value = value + 1
        stem, kind = name.rsplit(".", 1)
        if config.model_type == "gpt_oss" and (parts := gpt_oss_tensors(name, value)):
            found |= {f"blk.{name.split('.')[2]}.{part}": stack for part, stack in parts.items()}
        elif stem == "model.embed_tokens":
            found["token_embd.weight"] = value
        elif stem == "model.norm":
            found["output_norm.weight"] = value
        elif stem == "lm_head":
            found["output.weight"] = value
        elif name.endswith("experts.gate_up_proj"):
            block = f"blk.{name.split('.')[2]}."
            gate, up = value.chunk(2, dim=1)
            found[block + "ffn_gate_exps.weight"], found[block + "ffn_up_exps.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            found[f"blk.{name.split('.')[2]}.ffn_down_exps.weight"] = value
        else:
            _, _, layer, rest = stem.split(".", 3)
            if ARCHITECTURES[config.model_type] == "llama" and rest in (
                "self_attn.q_proj",
                "self_attn.k_proj",
            ):
                value = turned(
                    value, config.num_attention_heads if rest[-6] == "q" else config.num_key_value_heads
                )
            found[f"blk.{layer}.{names[rest]}.{kind}"] = value
    return {name: value.contiguous().numpy() for name, value in found.items()}


def write_model(model: Any, path: pathlib.Path) -> None:
    config, architecture = model.config, ARCHITECTURES[model.config.model_type]
    writer = gguf.GGUFWriter(str(path), architecture)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(float(rope.get("full_attention", rope)["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if architecture == "qwen3moe":
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    words = ["<unk>", "<s>", "</s>"] + [f"word{i}" for i in range(3, config.vocab_size)]
    kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2] + [gguf.TokenType.NORMAL] * (
        len(words) - 3
    )
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * config.vocab_size)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for name, value in tensors(model).items():
        writer.add_tensor(name, value)
    write_out(writer)
