"""`monograph diff` of GGUF files: against the folder they were made from, and against each other."""

import re

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from support.gguf_files import write_out
from support.gguf_models import model_of, save
from support.native_tool import run, run_json

SAME = {"same bytes", "same values"}


@pytest.fixture(scope="module", params=["Llama", "Gemma3"])
def exported(request, tmp_path_factory):
    """A folder and its f32 and Q8_0 files; Llama's rows of q and k are permuted there."""
    folder = tmp_path_factory.mktemp(request.param)
    save(model_of(request.param).to(torch.bfloat16), request.param, folder / "model", torch.bfloat16)
    for kind in ("f32", "q8_0"):
        run("export", folder / "model", folder / f"{kind}.gguf", "--type", kind)
    return request.param, folder


def test_a_folder_and_its_file(exported):
    name, folder = exported
    for pair in (("model", "f32.gguf"), ("f32.gguf", "model")):
        report = run_json("diff", *(folder / one for one in pair), "--tolerance", 1e-6)
        assert {row["name"] for row in report["weights"]} == load_file(
            folder / "model/model.safetensors"
        ).keys()
        # Gemma's norms are stored with one added, in float32.
        exact = SAME | ({"within tolerance"} if name == "Gemma3" else set())
        assert all(row["state"] in exact for row in report["weights"])
        matrices = [row for row in report["weights"] if "norm" not in row["name"]]
        assert all(row["state"] == "same values" for row in matrices)
        assert {row["format_a"] for row in report["weights"]} == {"f32" if "gguf" in pair[0] else "bf16"}
    worst = run_json("diff", folder / "model", folder / "q8_0.gguf", code=4)
    assert 1e-3 < worst["weights"][0]["relative_error"] < 0.01
    assert run_json("diff", folder / "model", folder / "q8_0.gguf", "--tolerance", 0.01)["mismatches"] == 0


def test_two_files_have_their_own_names(exported, tmp_path):
    _, folder = exported
    rows = run_json("diff", folder / "q8_0.gguf", folder / "q8_0.gguf")["weights"]
    assert {row["state"] for row in rows} == {"same bytes"}
    assert "blk.0.attn_q.weight" in {row["name"] for row in rows}
    rows = run_json("diff", folder / "f32.gguf", folder / "q8_0.gguf", "--tolerance", 0.01)["weights"]
    states = {row["name"]: row["state"] for row in rows}
    assert states["blk.0.attn_norm.weight"] == "same bytes"
    assert states["blk.0.attn_q.weight"] == "within tolerance"
    copy = bytearray((folder / "f32.gguf").read_bytes())
    tensor = next(t for t in gguf.GGUFReader(folder / "f32.gguf").tensors if t.name == "blk.1.ffn_up.weight")
    copy[tensor.data_offset + 7] ^= 0x80  # the sign of its second element
    (tmp_path / "other.gguf").write_bytes(copy)
    report = run_json("diff", folder / "f32.gguf", tmp_path / "other.gguf", code=4)
    assert report["mismatches"] == 1
    first = report["weights"][0]
    assert first["name"] == "blk.1.ffn_up.weight"
    assert first["max_error"] == 2 * abs(float(tensor.data[0][1]))


def test_rows_in_another_order_differ(exported, tmp_path):
    """A file that keeps transformers' order of rows under the architecture "llama" is another model."""
    name, folder = exported
    if name != "Llama":
        pytest.skip("has no order of its own")
    state = load_file(folder / "model/model.safetensors")
    key = "model.layers.0.self_attn.q_proj.weight"
    heads = state[key].reshape(4, 2, 8, -1)
    save_file(
        state | {key: heads.transpose(1, 2).reshape(state[key].shape).contiguous()},
        tmp_path / "it.safetensors",
    )
    report = run_json("diff", tmp_path / "it.safetensors", folder / "f32.gguf", code=4)
    assert [row["name"] for row in report["weights"] if row["state"] == "differs"] == [key]


def test_experts(tmp_path):
    """A stack in the file is experts one by one, or the stack of the folder."""
    up, gate, down = (
        np.random.default_rng(i).standard_normal((4, 64, 64)).astype(np.float32) for i in range(3)
    )
    writer = gguf.GGUFWriter(tmp_path / "moe.gguf", "qwen3moe")
    writer.add_block_count(1)
    for kind, stack in (("up", up), ("gate", gate), ("down", down)):
        data = gguf.quants.quantize(stack, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"blk.0.ffn_{kind}_exps.weight", data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    write_out(writer)
    prefix = "model.layers.0.mlp.experts"
    single = {
        f"{prefix}.{i}.{kind}_proj.weight": torch.from_numpy(stack[i].copy())
        for kind, stack in (("up", up), ("gate", gate), ("down", down))
        for i in range(4)
    }
    save_file(single, tmp_path / "one.safetensors")
    rows = run_json("diff", tmp_path / "one.safetensors", tmp_path / "moe.gguf", "--tolerance", 0.01)[
        "weights"
    ]
    assert [row["state"] for row in rows] == ["within tolerance"] * 12
    other = {"up": "gate", "gate": "up", "down": "down"}
    swapped = {re.sub(r"(\w+)_proj", lambda m: f"{other[m[1]]}_proj", name): t for name, t in single.items()}
    save_file(swapped, tmp_path / "swapped.safetensors")
    report = run_json(
        "diff", tmp_path / "swapped.safetensors", tmp_path / "moe.gguf", "--tolerance", 0.01, code=4
    )
    assert report["mismatches"] == 8


def test_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "it.gguf", "mamba")
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((2, 32), np.float32))
    write_out(writer)
    save_file({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    message = run("diff", tmp_path / "it.gguf", tmp_path / "a.safetensors", code=3).stderr
    assert "mamba" in message
    assert run_json("diff", tmp_path / "it.gguf", tmp_path / "it.gguf")["mismatches"] == 0  # any architecture
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "it.gguf").read_bytes()[:40])
    assert "cut.gguf" in run("diff", tmp_path / "cut.gguf", tmp_path / "it.gguf", code=3).stderr
