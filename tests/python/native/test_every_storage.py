"""Every command over every storage, odd sizes and dimensions of 0: right by numpy, or exit code 3."""

import json
import shutil
import subprocess

import numpy as np
import pytest
from safetensors.numpy import load_file

from support.native_tool import program
from support.stored_bases import EXPERTS, LINEAR, SIZES, STORAGES, stored, write_adapter, write_base

NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
CASES = [(storage, size) for storage in STORAGES for size in SIZES]


def call(*words):
    done = subprocess.run([str(program()), *map(str, words)], capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 1, 3, 4), f"{words}: {done.returncode}\n{done.stderr}"
    return done


def done_or_refused(*words, out=None):
    """Whether it worked; else it was refused by exit code 3, with one line, and nothing was written."""
    done = call(*words)
    assert done.returncode in (0, 3), done.stderr
    if out is not None:
        assert out.exists() == (done.returncode == 0)
    if done.returncode == 3:
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    return done.returncode == 0


def nf4_of(matrix):
    """NF4 with blocks of 64, decoded: the nearest of 16 numbers times the largest of the block."""
    flat = matrix.reshape(-1)
    blocks = np.pad(flat, (0, -len(flat) % 64)).reshape(-1, 64)
    largest = np.abs(blocks).max(1, keepdims=True, initial=0)
    nearest = np.abs((blocks / np.where(largest == 0, 1, largest))[..., None] - NF4).argmin(-1)
    return (NF4[nearest] * largest).reshape(-1)[: len(flat)].reshape(matrix.shape)


def prepared(tmp_path, storage, size):
    """The folder of the base, its values, or nothing if even it was refused."""
    of = write_base(tmp_path / "base", storage, SIZES[size])
    if storage != "packed":
        return tmp_path / "base", of
    out = tmp_path / "packed"
    if not done_or_refused("quantize", tmp_path / "base", out, "--to", "nf4", "--quiet", out=out):
        pytest.skip("such a matrix is not quantised")
    return out, {name: nf4_of(matrix) for name, matrix in of.items()}


def check_tensors(found, wanted, tolerance):
    for name, matrix in wanted.items():
        assert found[name].shape == matrix.shape, name
        np.testing.assert_allclose(found[name], matrix, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize(("storage", "size"), CASES)
def test_looking_changes_nothing_and_sees_every_element(tmp_path, storage, size):
    base, of = prepared(tmp_path, storage, size)
    report = json.loads(call("inspect", base, "--json").stdout)
    elements = sum(matrix.size for matrix in stored(storage, of).values())
    embedding = 8 * max(SIZES[size].hidden, 1)
    assert sum(np.prod(weight["shape"], dtype=int) for weight in report["weights"]) == elements + embedding
    assert call("verify", base).returncode == 0
    shutil.copytree(base, tmp_path / "copy")
    assert call("diff", base, tmp_path / "copy").returncode == 0


@pytest.mark.parametrize(("storage", "size"), CASES)
def test_quantised_and_dequantised(tmp_path, storage, size):
    of = write_base(tmp_path / "base", storage, SIZES[size])
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    assert not done_or_refused("dequantize", tmp_path / "base", plain, out=plain)
    words = ["--to", "nf4", "--experts", "keep" if storage in ("plain", "packed") else "stack", "--quiet"]
    if not done_or_refused("quantize", tmp_path / "base", packed, *words, out=packed):
        return
    assert call("verify", packed).returncode == 0
    if not done_or_refused("dequantize", packed, plain, "--quiet", out=plain):
        return  # nothing to quantise
    wanted = {
        name: np.array([nf4_of(one) for one in stack]).reshape(stack.shape) for name, stack in of.items()
    }
    if storage in ("plain", "packed"):
        wanted = {name: nf4_of(matrix) for name, matrix in of.items()}
    as_stored = "stacked" if storage == "one_by_one" else storage
    check_tensors(load_file(plain / "model.safetensors"), stored(as_stored, wanted), 1e-6)


@pytest.mark.parametrize(("storage", "size"), CASES)
def test_merged(tmp_path, storage, size):
    base, of = prepared(tmp_path, storage, size)
    changes = write_adapter(tmp_path / "adapter", of)
    weights = "dequantized" if storage == "packed" else "original"
    out = tmp_path / "merged"
    words = ["--adapter", tmp_path / "adapter", "--base", weights, "--out", out, "--quiet"]
    if not done_or_refused("merge", base, *words, out=out):
        assert size not in ("odd", "one")
        return
    merged = {name: of[name] + changes[name] for name in of}
    check_tensors(load_file(out / "model.safetensors"), stored(storage, merged), 2e-6)


@pytest.mark.parametrize("server", ["vllm", "sglang", "llama.cpp", "peft"])
@pytest.mark.parametrize(("storage", "size"), CASES)
def test_adapters_are_checked_and_converted_by_one_set_of_rules(tmp_path, storage, size, server):
    base, of = prepared(tmp_path, storage, size)
    changes = write_adapter(tmp_path / "adapter", of)
    out = tmp_path / ("out.gguf" if server == "llama.cpp" else "out")
    checked = call("adapter", "check", base, tmp_path / "adapter", "--for", server, "--json")
    findings = json.loads(checked.stdout)["findings"]
    words = ["adapter", "convert", base, tmp_path / "adapter", "--for", server, "--out", out]
    converted = done_or_refused(*words, out=out)
    assert converted == all(one["convertible"] for one in findings), findings
    if size in ("odd", "one") and server != "llama.cpp":
        assert converted == (storage != "transposed" or server == "peft"), findings
    if not converted or server in ("llama.cpp", "peft"):
        return
    found = load_file(out / "adapter_model.safetensors")

    def product(module):
        a, b = (found[f"base_model.model.{module}.lora_{one}.weight"].astype(np.float64) for one in "AB")
        return b @ a

    if storage in ("plain", "packed"):
        return np.testing.assert_allclose(product(LINEAR), changes[LINEAR], rtol=1e-6, atol=1e-6)
    for expert, change in enumerate(changes[f"{EXPERTS}.gate_up_proj"]):
        names = ("gate_proj", "up_proj")
        whole = np.concatenate([product(f"{EXPERTS}.{expert}.{name}") for name in names])
        np.testing.assert_allclose(whole, change, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("storage", "size"), CASES)
def test_what_is_no_whole_model_is_not_exported(tmp_path, storage, size):
    base, _ = prepared(tmp_path, storage, size)
    assert not done_or_refused("export", base, tmp_path / "model.gguf", out=tmp_path / "model.gguf")
