"""`inspect`, `verify` and `dequantize` of a GGUF file, against PyPI's gguf and the model it was made from."""

import random
import struct
import subprocess

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from support.gguf_files import write_out
from support.gguf_models import model_of, save
from support.native_tool import program, run, run_json

TYPES = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"]
TYPES += ["F32", "F16", "BF16"]
# Where a block has fp16 numbers, which random bytes must not make infinite.
HALVES = {"Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "MXFP4": []}
ROWS, COLUMNS = 512, 2048


def random_blocks(kind, rows, columns):
    """Bytes of a tensor: every code, any finite scale."""
    per_block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    generator = np.random.default_rng(TYPES.index(kind))
    if per_block == 1:
        values = generator.standard_normal((rows, columns)).astype(np.float32)
        if kind == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.astype(np.float16 if kind == "F16" else np.float32).view(np.uint8)
    blocks = generator.integers(0, 256, (rows * columns // per_block, size), dtype=np.uint8)
    for place in HALVES.get(kind, [0]):
        infinite = blocks[:, place + 1] & 0x7C == 0x7C
        blocks[infinite, place + 1] &= 0xFB
    if kind == "MXFP4":
        blocks[:, 0] = np.minimum(blocks[:, 0], 250)
    return blocks.reshape(rows, -1)


def write(path, tensors, heads=8, architecture="qwen3"):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads // 2)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_float32("x.float", 0.5)
    for name, kind, data in tensors:
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    write_out(writer)


@pytest.mark.parametrize("kind", TYPES)
def test_values_are_those_of_the_producer(tmp_path, kind):
    """A million elements of random bytes in each type: none differs from the gguf package's float32."""
    data = random_blocks(kind, ROWS, COLUMNS)
    write(tmp_path / "it.gguf", [("blk.0.ffn_up.weight", kind, data)])
    run("dequantize", tmp_path / "it.gguf", tmp_path / "out", "--to", "fp32", "--jobs", 2)
    found = load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].numpy()
    wanted = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    assert found.size == ROWS * COLUMNS
    differ = np.count_nonzero(found != wanted.reshape(found.shape))
    assert differ == 0
    assert len(np.unique(found)) > 1000  # not a constant
    listed = run_json("inspect", tmp_path / "it.gguf")
    assert listed["weights"][0]["format"] == kind.lower()
    assert listed["total"]["bytes"] == data.nbytes
    assert run_json("verify", tmp_path / "it.gguf")["findings"] == []


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen3", "Gemma3"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_exported_model_comes_back(tmp_path, name, dtype):
    """Names, order of rows, tied heads and norms: the folder's own weights."""
    model = model_of(name).to(torch.bfloat16)
    save(model, name, tmp_path / "model")
    run("export", tmp_path / "model", tmp_path / "it.gguf", "--type", "f32")
    run("dequantize", tmp_path / "it.gguf", tmp_path / "out", "--to", dtype)
    found = load_file(tmp_path / "out" / "model.safetensors")
    wanted = load_file(tmp_path / "model" / "model.safetensors")
    assert found.keys() == wanted.keys()
    for key, values in wanted.items():
        if name == "Gemma3" and key.endswith("norm.weight"):  # one plus the weight is stored in float32
            torch.testing.assert_close(found[key].float(), values.float(), rtol=0, atol=2.0**-8)
        else:
            assert torch.equal(found[key].to(values.dtype), values), key


def test_experts_are_a_tensor_each_and_biases_are_turned(tmp_path):
    stack = np.arange(4 * 6 * 32, dtype=np.float32).reshape(4, 6, 32)
    write(tmp_path / "moe.gguf", [("blk.1.ffn_down_exps.weight", "F32", stack)], architecture="qwen3moe")
    run("dequantize", tmp_path / "moe.gguf", tmp_path / "moe", "--to", "fp32")
    found = load_file(tmp_path / "moe" / "model.safetensors")
    assert sorted(found) == [f"model.layers.1.mlp.experts.{i}.down_proj.weight" for i in range(4)]
    for expert in range(4):
        assert np.array_equal(
            found[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"].numpy(), stack[expert]
        )
    bias = np.arange(32, dtype=np.float32)
    turned = bias.reshape(2, 2, 8).swapaxes(1, 2).reshape(-1)  # as convert_hf_to_gguf permutes rows
    write(tmp_path / "it.gguf", [("blk.0.attn_q.bias", "F32", turned)], heads=2, architecture="llama")
    run("dequantize", tmp_path / "it.gguf", tmp_path / "out", "--to", "fp32")
    (found,) = load_file(tmp_path / "out" / "model.safetensors").values()
    assert np.array_equal(found.numpy(), bias)


def test_what_cannot_be_right_is_refused_by_name(tmp_path):
    data = random_blocks("F32", 6, 32).copy()
    path = tmp_path / "it.gguf"

    def refused(*words, code=3, command="dequantize"):
        more = [tmp_path / "out"] if command == "dequantize" else []
        message = run(command, path, *more, code=code).stderr
        assert all(word in message for word in words), message
        assert not (tmp_path / "out").exists()

    write(path, [("blk.0.ffn_up.weight", "F32", data)], architecture="mamba")
    refused("mamba", "qwen3")
    write(path, [("blk.0.ssm_in.weight", "F32", data)])
    refused("blk.0.ssm_in.weight", "transformers")
    write(path, [("blk.0.attn_q.weight", "F32", data)], architecture="llama")
    refused("blk.0.attn_q.weight", "6 rows", "8 heads")
    write(path, [("blk.0.ffn_up.weight", "Q2_K", random_blocks("Q8_0", 64, 256)[:, :84].copy())])
    refused("blk.0.ffn_up.weight", "type 10 (q2_k)", "q4_k")
    experts = np.zeros((70_000, 1, 1), dtype=np.float32)
    write(path, [("blk.0.ffn_up_exps.weight", "F32", experts)], architecture="qwen3moe")
    refused("blk.0.ffn_up_exps.weight", "70000", "65536 experts")
    data.view(np.float32)[3, 5] = np.nan
    write(path, [("blk.0.ffn_up.weight", "F32", data)])
    refused("blk.0.ffn_up.weight", "nan", "row 3, column 5")
    report = run_json("verify", path, code=1)["findings"]
    assert [(one["weight"], one["count"], one["first"]) for one in report] == [
        ("blk.0.ffn_up.weight", 1, 3 * 32 + 5)
    ]
    assert "dequantize makes a folder of it" in run("quantize", path, tmp_path / "out", code=3).stderr
    for option in ("--check", "--write-manifest"):
        assert "GGUF" in run("verify", path, option, tmp_path / "m.json", code=2).stderr


def run_any(*arguments):
    command = [program(), *map(str, arguments), "--quiet"]
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode


def test_a_thousand_damaged_files_are_refused_or_read(tmp_path):
    """One to three bytes of the header, or the length, are changed: exit code 0, 1 or 3, never a crash."""
    path = tmp_path / "it.gguf"
    write(path, [(f"blk.{i}.ffn_up.weight", "Q4_K", random_blocks("Q4_K", 2, 256)) for i in range(2)])
    whole = path.read_bytes()
    header = len(whole) - 2 * 288
    chance = random.Random(0)
    codes = {0: 0, 1: 0, 3: 0}
    for _ in range(1000):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            if chance.random() < 0.3:
                place = chance.randrange(header - 8)
                damaged[place : place + 8] = struct.pack("<Q", chance.choice([0, 2**63, 2**64 - 1, 2**32]))
            else:
                damaged[chance.randrange(header)] = chance.randrange(256)
        if chance.random() < 0.2:
            damaged = damaged[: chance.randrange(len(damaged))]
        path.write_bytes(damaged)
        done = run_any("verify", path)
        codes[done] += 1
    assert codes[3] > 500
    assert codes[0] > 10
