"""Tiny bases in every way that folders store matrices, an adapter for each, and their values for numpy."""

from __future__ import annotations

import json
import pathlib
from dataclasses import dataclass

import numpy as np
from safetensors.numpy import save_file

RANK, ALPHA = 2, 6
LINEAR = "model.layers.0.self_attn.q_proj"
EXPERTS = "model.layers.0.mlp.experts"
# How a matrix is stored, and the model_type that stores it so.
STORAGES = {
    "plain": "llama",
    "packed": "llama",
    "transposed": "gpt_oss",
    "stacked": "qwen3_5_moe_text",
    "one_by_one": "qwen3_moe",
}


@dataclass(frozen=True)
class Sizes:
    """Outputs and inputs of the linear layer, hidden and inner width and number of the experts."""

    outputs: int = 7
    inputs: int = 65
    hidden: int = 5
    inner: int = 3
    experts: int = 3


SIZES = {
    "odd": Sizes(),
    "one": Sizes(1, 1, 1, 1, 1),
    "no_outputs": Sizes(outputs=0, inner=0),
    "no_inputs": Sizes(inputs=0),
    "no_experts": Sizes(experts=0),
}


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def values(storage: str, sizes: Sizes) -> dict[str, np.ndarray]:
    """The matrices that LoRA acts on: [outputs, inputs], or [experts, outputs, inputs] of a parameter."""
    if storage in ("plain", "packed"):
        return {LINEAR: numbers(1, sizes.outputs, sizes.inputs)}
    return {
        f"{EXPERTS}.gate_up_proj": numbers(2, sizes.experts, 2 * sizes.inner, sizes.hidden),
        f"{EXPERTS}.down_proj": numbers(3, sizes.experts, sizes.hidden, sizes.inner),
    }


def stored(storage: str, of: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of the files."""
    if storage in ("plain", "packed"):
        return {f"{name}.weight": matrix for name, matrix in of.items()}
    if storage == "transposed":
        return {name: np.ascontiguousarray(stack.transpose(0, 2, 1)) for name, stack in of.items()}
    if storage == "stacked":
        return dict(of)
    gate_up, down = of.values()
    tensors: dict[str, np.ndarray] = {}
    for expert in range(len(down)):
        gate, up = np.split(gate_up[expert], 2)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": down[expert]}
        tensors |= {f"{EXPERTS}.{expert}.{name}.weight": part.copy() for name, part in parts.items()}
    return tensors


def write_base(folder: pathlib.Path, storage: str, sizes: Sizes) -> dict[str, np.ndarray]:
    """A folder in fp32; gives its values. "packed" is quantised by whoever calls."""
    of = values(storage, sizes)
    folder.mkdir(parents=True)
    tensors = {"model.embed_tokens.weight": numbers(4, 8, max(sizes.hidden, 1)), **stored(storage, of)}
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": STORAGES[storage], "hidden_size": sizes.hidden, "num_attention_heads": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return of


def write_adapter(folder: pathlib.Path, of: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """LoRA on each of the values, as PEFT 0.20 writes it; gives what is added to them."""
    folder.mkdir(parents=True)
    tensors, changes = {}, {}
    parameters = [name.rpartition("layers.0.")[2] for name in of if name != LINEAR]
    for depth, (name, matrix) in enumerate(reversed(of.items())):
        outputs, inputs = matrix.shape[-2:]
        count = matrix.shape[0] if matrix.ndim == 3 else 1
        a, b = numbers(5 + depth, count * RANK, inputs), numbers(7 + depth, outputs, RANK * count)
        module = name if matrix.ndim == 2 else EXPERTS + ".base_layer" * depth
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
        left, right = a.astype(np.float64).reshape(count, RANK, inputs), b.astype(np.float64)
        product = [right[:, expert::count] @ left[expert] for expert in range(count)]
        changes[name] = ALPHA / RANK * np.array(product).reshape(matrix.shape)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "peft_version": "0.20.0",
        "target_modules": ["q_proj"], "target_parameters": parameters,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return changes
