"""The native tool on compressed-tensors' integers and FP8 by row: the producer's own values, and refusals."""

import json

import pytest
import torch
from safetensors.torch import save_file

from support import producer_folders
from support.group_weights import group_weight
from support.native_tool import run, run_json
from support.producer_folders import tensors

pytest.importorskip("compressed_tensors")
PRESETS = {
    "W4A16": "int4",
    "W4A16_ASYM": "int4",
    "W8A16": "int8",
    "INT8": "int8",
    "FP8_DYNAMIC": "fp8",
    "FP8": "fp8",
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return producer_folders.make_source(tmp_path_factory.mktemp("source"))


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_what_a_producer_wrote_is_read_as_it_reads_it(tmp_path, source, preset):
    folder = tmp_path / "packed"
    reference = producer_folders.compressed_tensors(source, folder, {preset: ["Linear"]})
    found = {w["name"]: w for w in run_json("inspect", folder)["weights"]}
    packed = [name for name in reference if name not in producer_folders.DENSE]
    assert len(packed) == 13
    assert {found[f"{name}.weight"]["format"] for name in packed} == {PRESETS[preset]}
    run("verify", folder)
    run("dequantize", folder, tmp_path / "plain", "--quiet")
    plain = tensors(tmp_path / "plain")
    for name in packed:
        assert torch.equal(plain[f"{name}.weight"], reference[name]), name
    assert not [name for name in plain if name.endswith(("_packed", "_scale", "_zero_point", "_shape"))]


def one_weight(folder, name, symmetric, **more):
    w = group_weight(name, (40, 256, 32), symmetric)
    from monograph.quant.quant_methods.compressed_tensors import CompressedTensors

    folder.mkdir()
    parts = {
        f"w.{part}": tensor.contiguous() for part, tensor in CompressedTensors().unpack(w.packed).items()
    }
    save_file(parts | more, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return w


@pytest.mark.parametrize("suffix", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_types_of_scales_are_told_apart(tmp_path, suffix, symmetric):
    w = one_weight(tmp_path / "packed", f"int4-{suffix}", symmetric)
    run("dequantize", tmp_path / "packed", tmp_path / "plain", "--quiet")
    got = tensors(tmp_path / "plain")["w.weight"]
    assert got.dtype == getattr(torch, w.packed.format.scale_types[0])
    assert torch.equal(got, w.dense(got.dtype))


def test_columns_in_another_order_are_not_decoded(tmp_path):
    order = torch.arange(256, dtype=torch.int32) // 32
    one_weight(tmp_path / "packed", "int4-bf16", True, **{"w.weight_g_idx": order})
    assert run_json("inspect", tmp_path / "packed")["weights"][0]["format"] == "int-g_idx"
    done = run("dequantize", tmp_path / "packed", tmp_path / "plain", "--quiet", code=3)
    assert "cannot decode int-g_idx (compressed-tensors)" in done.stderr


QUANTISED = {
    "architectures": ["LlamaForCausalLM"],
    "quantization_config": {"quant_method": "compressed-tensors"},
}


def refused_by(folder, *words):
    for command in (["verify", folder], ["dequantize", folder, folder.parent / "plain"]):
        message = run(*command, code=3).stderr
        assert all(word in message for word in words), message


@pytest.mark.parametrize("missing", ["weight_scale", "weight_shape", "weight_packed"])
def test_a_weight_without_one_of_its_parts_is_an_error(tmp_path, missing):
    folder = tmp_path / "packed"
    one_weight(folder, "int4-bf16", False)
    (folder / "config.json").write_text(json.dumps(QUANTISED))
    run("verify", folder)
    save_file({k: v for k, v in tensors(folder).items() if k != f"w.{missing}"}, folder / "model.safetensors")
    refused_by(folder, "belongs to a compressed-tensors weight 'w' that lacks")


def test_codes_in_another_type_or_without_scales_are_an_error(tmp_path):
    folder = tmp_path / "packed"
    one_weight(folder, "int4-bf16", True)
    (folder / "config.json").write_text(json.dumps(QUANTISED))
    parts = tensors(folder)
    parts["w.weight_packed"] = parts["w.weight_packed"].view(torch.uint8)
    save_file(parts, folder / "model.safetensors")
    refused_by(folder, "'w.weight_packed'", "in another type")
    save_file({"w.weight": torch.zeros(8, 8).to(torch.float8_e4m3fn)}, folder / "model.safetensors")
    refused_by(folder, "'w.weight'", "F8_E4M3 without the scales")


@pytest.mark.parametrize(
    ("key", "value"),
    [("transform_config", {"config_groups": {"R1": {}}}), ("sparsity_config", {"format": "sparse-24"})],
)
def test_rotations_and_sparsity_are_not_dropped(tmp_path, key, value):
    folder = tmp_path / "packed"
    one_weight(folder, "int4-bf16", True)
    quantisation = QUANTISED["quantization_config"] | {key: value}
    (folder / "config.json").write_text(json.dumps(QUANTISED | {"quantization_config": quantisation}))
    refused_by(folder, f"quantization_config.{key} is set", "changes what a layer computes")
    assert run_json("inspect", folder)["weights"][0]["format"] == "int4"
    dense = {"format": "dense"} if key == "sparsity_config" else {}
    quantisation = QUANTISED["quantization_config"] | {key: dense}
    (folder / "config.json").write_text(json.dumps(QUANTISED | {"quantization_config": quantisation}))
    run("verify", folder)
