"""How a model has its experts follows from model_type, whatever its files store: `adapter` asks that."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from support.native_tool import run, run_json

EXPERTS, INNER, HIDDEN, RANK = 4, 32, 64, 2
MODULES = {
    "gpt_oss": "model.layers.0.mlp.experts",
    "llama4_text": "model.layers.0.feed_forward.experts",
    "qwen3_vl_moe_text": "model.layers.0.mlp.experts",
    "mixtral": "model.layers.0.block_sparse_moe.experts",
    "qwen3_5_moe_text": "model.layers.0.mlp.experts",
    "nobody_knows": "model.layers.0.mlp.experts",
}
TRANSPOSED = ("gpt_oss", "llama4_text", "qwen3_vl_moe_text")


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def write_config(folder, model_type, **more):
    config = {"model_type": model_type, "hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": 64}
    (folder / "config.json").write_text(json.dumps(config | {"num_local_experts": EXPERTS} | more))


def write_base(folder, model_type):
    """A plain folder with stacks as the files of the model have them."""
    folder.mkdir()
    module = MODULES[model_type]
    stacks = {"gate_up_proj": (EXPERTS, 2 * INNER, HIDDEN), "down_proj": (EXPERTS, HIDDEN, INNER)}
    tensors = {"model.embed_tokens.weight": numbers(1, 64, HIDDEN)}
    for seed, (name, shape) in enumerate(stacks.items()):
        stack = numbers(seed, *shape)
        turned = stack.transpose(0, 2, 1) if model_type in TRANSPOSED else stack
        tensors[f"{module}.{name}"] = np.ascontiguousarray(turned)
    save_file(tensors, folder / "model.safetensors")
    write_config(folder, model_type)
    return folder


def write_shipped_gpt_oss(folder):
    """MXFP4 as OpenAI ships it: outputs first."""
    folder.mkdir()
    module = MODULES["gpt_oss"]
    random = np.random.default_rng(0)
    tensors = {"model.embed_tokens.weight": numbers(1, 64, HIDDEN)}
    for name, rows, cols in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
        blocks = random.integers(0, 256, (EXPERTS, rows, cols // 32, 16), dtype=np.uint8)
        tensors[f"{module}.{name}_blocks"] = blocks
        tensors[f"{module}.{name}_scales"] = np.full((EXPERTS, rows, cols // 32), 120, np.uint8)
        tensors[f"{module}.{name}_bias"] = numbers(3, EXPERTS, rows)
    save_file(tensors, folder / "model.safetensors")
    write_config(folder, "gpt_oss", quantization_config={"quant_method": "mxfp4"})
    return folder


def write_adapter(folder, module):
    folder.mkdir()
    begin = f"base_model.model.{module}."
    tensors = {
        begin + "base_layer.lora_A.weight": numbers(11, EXPERTS * RANK, HIDDEN),
        begin + "base_layer.lora_B.weight": numbers(12, 2 * INNER, EXPERTS * RANK),
        begin + "lora_A.weight": numbers(13, EXPERTS * RANK, INNER),
        begin + "lora_B.weight": numbers(14, HIDDEN, EXPERTS * RANK),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": [], "peft_version": "0.20.0",
        "bias": "none", "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return tensors


def stored_as(way, model_type, tmp_path):
    if way == "shipped":
        return write_shipped_gpt_oss(tmp_path / "base")
    base = write_base(tmp_path / "base", model_type)
    if way == "plain":
        return base
    packed = tmp_path / "packed"
    run("quantize", base, packed, "--to", way, "--experts", "stack", "--quiet")
    return packed


REFUSED = [("shipped", "gpt_oss")] + [
    (way, kind)
    for kind in ("gpt_oss", "llama4_text", "nobody_knows")
    for way in ("plain", "nf4", "mxfp4")
    if kind != "nobody_knows" or way != "shipped"
]


@pytest.mark.parametrize(("way", "model_type"), REFUSED)
@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_without_modules_of_single_experts_no_form_is_made(tmp_path, way, model_type, server):
    base = stored_as(way, model_type, tmp_path)
    write_adapter(tmp_path / "adapter", MODULES[model_type])
    found = run_json("adapter", "check", base, tmp_path / "adapter", "--for", server, code=1)["findings"]
    expected = [one for one in found if one["rule"] == "experts"]
    assert len(expected) == 2
    assert all(f"model_type '{model_type}'" in one["what"] and "merge" in one["what"] for one in expected)
    done = run(
        "adapter", "convert", base, tmp_path / "adapter", "--for", server, "--out", tmp_path / "out", code=3
    )
    assert model_type in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("way", ["plain", "nf4", "mxfp4"])
@pytest.mark.parametrize("model_type", ["qwen3_vl_moe_text", "mixtral", "qwen3_5_moe_text"])
def test_single_experts_have_the_names_of_the_model_and_halves_of_gate_up(tmp_path, way, model_type):
    base = stored_as(way, model_type, tmp_path)
    module = MODULES[model_type]
    trained = write_adapter(tmp_path / "adapter", module)
    run("adapter", "convert", base, tmp_path / "adapter", "--for", "vllm", "--out", tmp_path / "out")
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    gate, up, down = ("w1", "w3", "w2") if model_type == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    begin = f"base_model.model.{module}."
    for expert in range(EXPERTS):
        gate_up = trained[begin + "base_layer.lora_B.weight"][:, expert::EXPERTS]
        wanted = {gate: gate_up[:INNER], up: gate_up[INNER:]}
        wanted[down] = trained[begin + "lora_B.weight"][:, expert::EXPERTS]
        for leaf, values in wanted.items():
            np.testing.assert_array_equal(found[f"{begin}{expert}.{leaf}.lora_B.weight"], values)
    assert len(found) == EXPERTS * 3 * 2
