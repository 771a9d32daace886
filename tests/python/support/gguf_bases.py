"""A GGUF file whose matrices have several types, random blocks of some, and the model that it holds.

Settings and tokenizer are those that `monograph export` writes of a folder; the blocks are decoded by the
gguf package, and the order of Llama's rows is torch's.
"""

from __future__ import annotations

import pathlib
import struct
from math import prod
from typing import Any

import gguf
import numpy as np
import torch

from support.ggml_weights import gguf_values, random_blocks
from support.gguf_by_package import tiny, write_by_package
from support.gguf_models import model_of, save
from support.llama_cpp_model import GEMMA_NAMES, NAMES, PHI_NAMES
from support.native_tool import run

# As llama-quantize's Q4_K_M has them, with types of blocks of 32 beside.
MIXTURE = {
    "attn_q": "q4_k", "attn_k": "q5_0", "attn_v": "q6_k", "attn_output": "q5_k", "ffn_gate": "iq4_xs",
    "ffn_up": "q4_k", "ffn_down": "q6_k", "token_embd": "q6_k", "output": "q6_k", "attn_qkv": "q5_k",
    "ffn_gate_exps": "q4_k", "ffn_up_exps": "q5_k", "ffn_down_exps": "q6_k",
}  # fmt: skip
BY_PACKAGE = ("Qwen2", "Phi3", "Qwen3Moe", "GptOss")  # not by `monograph export`, though it knows them
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
GPT_OSS = {
    "intermediate_size": 256, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 16,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 64,
    },
}  # fmt: skip
# As the files of the hub: experts in MXFP4, the rest in 8 bits.
GPT_OSS_KINDS = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output", "token_embd", "output"), "q8_0")
GPT_OSS_KINDS |= dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), "mxfp4")
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}


def rewrite(source: pathlib.Path, target: pathlib.Path, blocks: dict[str, tuple[str, np.ndarray]]) -> None:
    """The file with other tensors of the same names: its pairs byte by byte."""
    reader = gguf.GGUFReader(source)
    raw = source.read_bytes()
    pairs = raw[24 : reader.tensors[0].field.offset]
    infos, data = b"", b""
    for tensor in reader.tensors:
        kind, stored = blocks.get(tensor.name, (tensor.tensor_type.name, np.asarray(tensor.data)))
        number = gguf.GGMLQuantizationType[kind.upper()].value
        name = tensor.name.encode()
        shape = [int(size) for size in tensor.shape]  # the fastest first
        infos += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(shape))
        infos += struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<IQ", number, len(data))
        data += stored.tobytes()
        data += bytes(-len(data) % 32)
    head = raw[:8] + struct.pack("<Q", len(reader.tensors)) + raw[16:24] + pairs + infos
    target.write_bytes(head + bytes(-len(head) % 32) + data)


def unturned(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows in llama.cpp's order in that of transformers."""
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def module_of(tensor: str, names: dict[str, str]) -> str:
    stem = tensor.removesuffix(".weight")
    if stem in ("token_embd", "output"):
        return {"token_embd": "model.embed_tokens", "output": "lm_head"}[stem]
    _, layer, part = stem.split(".")
    own = {theirs: ours for ours, theirs in names.items()}
    return f"model.layers.{layer}.{own[part]}"


def place_of(tensor: str, state: dict[str, torch.Tensor], names: dict[str, str]) -> torch.Tensor:
    """Where the values of a tensor of the file are in the model."""
    stem = tensor.split(".")[-2]
    if not stem.endswith("_exps"):
        return state[module_of(tensor, names) + ".weight"]
    experts = f"model.layers.{tensor.split('.')[1]}.mlp.experts."
    if f"{experts}gate_up_proj_bias" in state:  # gpt-oss: inputs for rows, gate and up in turns
        down, pair = (state[experts + name].transpose(1, 2) for name in ("down_proj", "gate_up_proj"))
        return down if stem == "ffn_down_exps" else pair[:, stem == "ffn_up_exps" :: 2]
    if stem == "ffn_down_exps":
        return state[experts + "down_proj"]
    gate, up = state[experts + "gate_up_proj"].chunk(2, 1)
    return gate if stem == "ffn_gate_exps" else up


def mixed_base(
    name: str, place: pathlib.Path, kinds: dict[str, str] | None = None, **settings: Any
) -> tuple[pathlib.Path, Any]:
    """(file, model in float32); `place`/model is the folder whose settings and tokenizer it has."""
    sizes: dict[str, Any] = dict(SIZES)
    if name == "Gemma3":
        settings |= {"query_pre_attn_scalar": SIZES["head_dim"]}
    if name in BY_PACKAGE:
        if name in ("Qwen3Moe", "GptOss"):
            sizes |= EXPERTS if name == "Qwen3Moe" else GPT_OSS
        else:
            del sizes["head_dim"]
        model = tiny(name, **(sizes | settings))
    else:
        model = model_of(name, **(sizes | settings))
    head = "token_embd" if model.config.tie_word_embeddings else "output"
    with torch.no_grad():
        model.get_output_embeddings().weight[2] = 0  # never the end of the text
        one = 1 if name == "Gemma3" else 0
        model.model.norm.weight.copy_((model.model.norm.weight + one) / 4 - one)  # no log-probs of -60
    if name in BY_PACKAGE:
        model.config.save_pretrained(place / "model")
        write_by_package(model, place / "plain.gguf", {"GptOss": "gpt-oss"}.get(name, name.lower()))
    else:
        save(model, name, place / "model")
        run("export", place / "model", place / "plain.gguf", "--type", "f32")
    blocks: dict[str, tuple[str, np.ndarray]] = {}
    state = model.state_dict()
    usual = GPT_OSS_KINDS if name == "GptOss" else MIXTURE
    names = {"Gemma3": GEMMA_NAMES, "Phi3": PHI_NAMES}.get(name, NAMES)
    for seed, tensor in enumerate(gguf.GGUFReader(place / "plain.gguf").tensors):
        stem = tensor.name.split(".")[-2]
        kind = (usual if kinds is None else kinds).get(stem)
        if kind is None or len(tensor.shape) == 1 or tensor.name.endswith(".bias"):
            continue
        cols, *matrices = (int(size) for size in tensor.shape)
        rows = prod(matrices)
        try:
            values = np.asarray(tensor.data, dtype=np.float32).reshape(rows, cols)
            stored = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind.upper()])
        except NotImplementedError:  # of the blocks of 256 the package only reads
            stored = random_blocks(kind, rows, cols, seed)
        if stem == head:
            stored[2] = 0
        blocks[tensor.name] = (kind, stored)
        dense = gguf_values(kind, stored).reshape(rows, cols)
        if name in ("Llama", "Mistral") and stem in ("attn_q", "attn_k"):
            config = model.config
            heads = config.num_attention_heads if stem == "attn_q" else config.num_key_value_heads
            dense = unturned(dense, heads)
        place_of(tensor.name, state, names).copy_(dense.reshape(*matrices[::-1], cols))
    rewrite(place / "plain.gguf", place / "it.gguf", blocks)
    return place / "it.gguf", model
