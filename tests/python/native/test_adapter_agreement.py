"""`adapter check` and `adapter convert` run the same rules: a form is made exactly where check says so."""

import json
import subprocess
import time

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from support.native_tool import program, run
from support.served_adapters import KINDS, edit_config, edit_tensors, saved, saved_experts

SERVERS = ("vllm", "sglang", "llama.cpp", "peft")
Q0 = "model.layers.0.self_attn.q_proj"


def call(*words):
    done = subprocess.run([str(program()), *map(str, words)], capture_output=True, text=True, timeout=120)
    assert done.returncode >= 0, f"{words}: signal {-done.returncode}"
    return done


def agreed(folder, server):
    """Whether a form can be made; check and convert must agree, and an adapter that is served needs none."""
    base, adapter = folder / "base", folder / "adapter"
    out = folder / ("out.gguf" if server == "llama.cpp" else f"out-{server}")
    checked = call("adapter", "check", base, adapter, "--for", server, "--json")
    converted = call("adapter", "convert", base, adapter, "--for", server, "--out", out)
    assert checked.returncode in (0, 1), checked.stderr
    findings = json.loads(checked.stdout)["findings"]
    possible = all(one["convertible"] for one in findings)
    if server == "peft" and not findings and "PEFT applies the adapter as it is" in converted.stderr:
        return True
    assert possible == (converted.returncode == 0), (server, findings, converted.stderr)
    assert converted.returncode in (0, 3)
    return possible


@pytest.mark.parametrize("kind", KINDS)
def test_of_each_kind(tmp_path, kind):
    saved(kind, tmp_path)
    for server in SERVERS:
        agreed(tmp_path, server)


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "granite", "gpt_oss"])
def test_of_experts(tmp_path, name):
    saved_experts(name, tmp_path)
    for server in SERVERS:
        agreed(tmp_path, server)


def with_base_shape(folder, name, shape):
    """The base with zeros of another shape for one weight, and the adapter's factors to fit."""
    path = folder / "base" / "model.safetensors"
    save_file(load_file(path) | {name + ".weight": np.zeros(shape, np.float32)}, path)

    def fit(tensors):
        a, b = (f"base_model.model.{name}.lora_{one}.weight" for one in "AB")
        tensors[a] = tensors[a].new_zeros(tensors[a].shape[0], shape[1])
        tensors[b] = tensors[b].new_zeros(shape[0], tensors[b].shape[1])
        return tensors

    edit_tensors(folder / "adapter", fit)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)])
def test_a_base_with_a_dimension_of_0_is_named_by_both(tmp_path, shape):
    saved("plain", tmp_path)
    with_base_shape(tmp_path, Q0, shape)
    for server in SERVERS:
        assert not agreed(tmp_path, server)
        done = run("adapter", "check", tmp_path / "base", tmp_path / "adapter", "--for", server, code=1)
        assert "wanted no dimension of 0" in done.stdout


def test_a_stack_of_no_experts_beside_one_expert(tmp_path):
    saved("plain", tmp_path)
    path = tmp_path / "base" / "model.safetensors"
    experts = "model.layers.0.mlp.experts"
    added = {
        experts + ".gate_up_proj": np.zeros((0, 64, 64), np.float32),
        experts + ".down_proj": np.zeros((0, 64, 32), np.float32),
        experts + ".3.up_proj.weight": np.zeros((32, 64), np.float32),
    }
    save_file(load_file(path) | added, path)
    config = tmp_path / "base" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "qwen3_moe"}))
    begin = f"base_model.model.{experts}.3.up_proj.lora_"
    factors = {begin + "A.weight": (8, 64), begin + "B.weight": (32, 8)}
    edit_tensors(
        tmp_path / "adapter", lambda t: t | {name: torch.zeros(shape) for name, shape in factors.items()}
    )
    for server in SERVERS:
        agreed(tmp_path, server)


def test_a_scale_that_no_float_holds_is_found_by_check_too(tmp_path):
    saved("plain", tmp_path)
    edit_config(tmp_path / "adapter", lora_alpha=1e300)
    assert not agreed(tmp_path, "vllm")


def test_a_thousand_hostile_patterns_are_refused_at_once(tmp_path):
    saved("plain", tmp_path)
    edit_config(tmp_path / "adapter", alpha_pattern={f"(.{{0,30}}){{0,30}}Z{i}": 1 for i in range(1000)})
    begin = time.monotonic()
    assert not agreed(tmp_path, "vllm")
    assert time.monotonic() - begin < 10
