"""Models of transformers as GGUF through the gguf package alone, and its own table of names."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from support.gguf_files import write_out
from support.gguf_models import COMMON, tokenizer_of


def add_tokenizer(writer: Any) -> None:
    """The tokenizer as convert_hf_to_gguf.py writes it, by the gguf package."""
    tokenizer = json.loads(tokenizer_of("Qwen3").to_str())
    tokens = {id: token for token, id in tokenizer["model"]["vocab"].items()}
    types = dict.fromkeys(tokens, gguf.TokenType.NORMAL)
    for token in tokenizer["added_tokens"]:
        tokens[token["id"]] = token["content"]
        types[token["id"]] = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
    size: Any = COMMON["vocab_size"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([tokens.get(i, f"[PAD{i}]") for i in range(size)])
    writer.add_token_types([types.get(i, gguf.TokenType.UNUSED) for i in range(size)])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")


def add_gpt_oss(writer: Any, config: Any) -> None:
    """What convert_hf_to_gguf.py writes beside the usual pairs."""
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_sliding_window(config.sliding_window)
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def gpt_oss_tensors(name: str, values: Any) -> dict[str, Any]:
    """Sinks and experts by their names there; transformers has gate and up in turns, and inputs for rows."""
    end = name.split(".", 3)[-1]
    if end == "self_attn.sinks":
        return {"attn_sinks.weight": values}
    if not end.startswith("mlp.experts."):
        return {}
    kind = "bias" if end.endswith("_bias") else "weight"
    rows = values if kind == "bias" else values.swapaxes(1, 2)
    if "down_proj" in end:
        return {f"ffn_down_exps.{kind}": rows}
    return {f"ffn_gate_exps.{kind}": rows[:, ::2], f"ffn_up_exps.{kind}": rows[:, 1::2]}


def write_by_package(
    model: Any,
    path: Any,
    architecture: str,
    change: Callable[[Any], None] = lambda writer: None,
    leave: Sequence[str] = (),
    experts: int | None = None,
) -> None:
    """A model of transformers through the gguf package's own table of names."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if architecture.endswith("moe"):
        writer.add_expert_count(experts or config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture == "gpt-oss":
        add_gpt_oss(writer, config)
    if architecture.startswith("qwen3") or architecture == "gpt-oss":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    add_tokenizer(writer)
    change(writer)
    number = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, values in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = values.float().numpy()
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            stored = stored + 1
        if name.endswith("shared_expert_gate.weight"):
            stored = stored[0]
        if architecture == "gpt-oss" and (parts := gpt_oss_tensors(name, stored)):
            for part, stack in parts.items():
                writer.add_tensor(f"blk.{name.split('.')[2]}.{part}", np.ascontiguousarray(stack))
            continue
        if name.endswith("mlp.experts.gate_up_proj"):
            half = stored.shape[1] // 2
            parts = {"gate": stored[:, :half], "up": stored[:, half:]}
        elif name.endswith("mlp.experts.down_proj"):
            parts = {"down": stored}
        else:
            found: Any = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if found not in leave:
                writer.add_tensor(found, np.ascontiguousarray(stored))
            continue
        for part, stack in parts.items():
            layer = name.split(".")[2]
            writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", np.ascontiguousarray(stack))
    write_out(writer)


def tiny(kind: str, **settings: Any) -> Any:
    torch.manual_seed(3)
    config = getattr(transformers, kind + "Config")(**(COMMON | {"rms_norm_eps": 1e-5} | settings))
    model = getattr(transformers, kind + "ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
