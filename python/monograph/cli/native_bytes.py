"""The bytes of a step of `monograph finetune`, as core/monograph/train/step_memory.cpp counts them.

Of a model in bf16, a micro-batch of one row a step, LoRA on every layer that the native trainer adapts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

# Those of core/monograph/train/model_config.cpp.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text")
_BF16, _FP32 = 2, 4


@dataclass(frozen=True)
class _Shape:
    """A model as the trainer sees it. mlps, mixtures: how many layers have an MLP, how many experts."""

    width: int
    inner: int
    query: int
    key: int
    heads: int
    head_size: int
    layers: int
    mlps: int
    branch_norms: bool
    ropes: int
    experts: int = 0
    slots: int = 0
    expert_inner: int = 0


def native_bytes(
    path: str, *, format_name: str | None, double_quant: bool, rank: int, tokens: int, checkpointing: bool
) -> dict[str, int]:
    """By what they are for, in the lines of `finetune --dry-run`. A folder that is packed already counts as
    it lies, of another the base is planned in the format."""
    from transformers import AutoConfig

    from monograph.ops.read_gguf import is_gguf

    if is_gguf(path):
        raise ValueError(f"{path}: the native trainer reads no GGUF file, wanted a folder")
    folder = os.path.dirname(path) if os.path.isfile(path) else path
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise ValueError(f"{path}: has no config.json, wanted a folder of transformers or that file")
    config = AutoConfig.from_pretrained(folder or ".")
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"{path}: model_type is {config.model_type!r}, the native trainer knows {', '.join(FAMILIES)}"
        )
    shape = _shape_of(config)
    numbers = _adapter_numbers(shape, rank)
    packed = getattr(config, "quantization_config", None) is not None and format_name is None
    return {
        "base": _stored_bytes(folder) if packed else _planned_bytes(path, format_name, double_quant),
        "adapter": numbers * (_FP32 + _BF16),
        "moments": numbers * 2 * _FP32,
        "gradients": _FP32 * (numbers + 1),
        "activations": _activation_bytes(shape, rank, tokens, checkpointing),
    }


def _shape_of(config: Any) -> _Shape:
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    gemma = config.model_type == "gemma3_text"
    mixtures = 0
    if config.model_type == "qwen3_moe":
        alone = set(config.mlp_only_layers or ())
        mixtures = sum(
            layer not in alone and (layer + 1) % config.decoder_sparse_step == 0 for layer in range(layers)
        )
    mlps = layers - mixtures
    return _Shape(
        width=config.hidden_size,
        inner=config.intermediate_size if mlps else 0,
        query=heads * head_size,
        key=config.num_key_value_heads * head_size,
        heads=heads,
        head_size=head_size,
        layers=layers,
        mlps=mlps,
        branch_norms=gemma,
        ropes=2 if gemma else 1,
        experts=config.num_experts if mixtures else 0,
        slots=config.num_experts_per_tok if mixtures else 0,
        expert_inner=config.moe_intermediate_size if mixtures else 0,
    )


def _projections(shape: _Shape) -> int:
    """With LoRA, of a layer: PEFT would take names of an MLP for the experts, so beside them it has none."""
    return 4 if shape.experts else 7


def _adapter_numbers(shape: _Shape, rank: int) -> int:
    attention = 4 * shape.width + 2 * shape.query + 2 * shape.key
    mlp = 0 if shape.experts else 3 * (shape.width + shape.inner)
    return shape.layers * rank * (attention + mlp)


def _activation_bytes(shape: _Shape, rank: int, tokens: int, checkpointing: bool) -> int:
    routes = shape.experts + shape.slots
    kept = (5 if shape.branch_norms else 4) * shape.width
    kept += 3 * shape.query + 3 * shape.key + 3 * shape.inner + routes
    room = 3 * shape.inner + 3 * shape.width + 2 * shape.query + 2 * shape.key + routes
    stream = (shape.layers + 1 + 3) * shape.width
    kept_layers = 1 if checkpointing else shape.layers
    passing = max(shape.query + shape.key, rank, shape.slots * 3 * shape.expert_inner)
    low = kept_layers * rank * _projections(shape)
    elements = kept_layers * kept + low + room + stream + passing
    fp32 = kept_layers * (shape.heads + 2 * shape.slots) + 2
    angles = 2 * tokens * shape.head_size * shape.ropes
    return tokens * (elements * _BF16 + fp32 * _FP32) + angles * _BF16


def _stored_bytes(folder: str) -> int:
    """Of all tensors in the files of a folder: what lies behind their headers."""
    found = 0
    for name in sorted(os.listdir(folder or ".")):
        if name.endswith(".safetensors"):
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                header = 8 + int.from_bytes(file.read(8), "little")
            found += os.path.getsize(path) - header
    if not found:
        raise ValueError(f"{folder}: has no .safetensors, and is quantised; wanted --format, to plan with")
    return found


def _planned_bytes(path: str, format_name: str | None, double_quant: bool) -> int:
    """Of the weights; buffers (tables of angles) are not stored."""
    from monograph.hf.transformers.planned_model import planned_model
    from monograph.nn import PackedExperts, QuantLinear

    model = planned_model(path, format_name, double_quant)
    buffers = [
        buffer.nbytes
        for module in model.modules()
        if not isinstance(module, QuantLinear | PackedExperts)
        for buffer in module.buffers(recurse=False)
    ]
    every = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    return sum(every.values()) - sum(buffers)
