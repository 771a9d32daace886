"""from_pretrained on folders that other tools wrote: every byte is the file's, every value the producer's."""

import importlib.util
import json
import pathlib

import pytest
import torch
from transformers import AutoModelForCausalLM

import monograph as mg
from monograph.nn import QuantLinear
from monograph.quant.quant_methods.fp8_block import Fp8Block
from support import producer_folders
from support.producer_folders import DENSE, tensors

pytestmark = pytest.mark.slow
# Packed bytes of a layer in our names and, of the file's, in any order that is there.
VALUES = ("weight_packed", "weight")
SCALES = ("weight_scale_inv", "weight_scale")
TENSOR_SCALES = ("weight_global_scale", "weight_scale_2")

CASES = {
    "fp8": ("fp8-block", lambda *where: producer_folders.transformers_fp8(*where)),
    "fp8-bf16": ("fp8-block", lambda *where: producer_folders.transformers_fp8(*where, "bfloat16")),
    "fp8-e8m0": ("fp8-block", lambda *where: producer_folders.transformers_fp8(*where, "e8m0")),
    "ct-nvfp4": (
        "nvfp4-divide",
        lambda *where: producer_folders.compressed_tensors(*where, {"NVFP4": ["Linear"]}),
    ),
    "ct-mxfp4": ("mxfp4", lambda *where: producer_folders.compressed_tensors(*where, {"MXFP4": ["Linear"]})),
    "ct-mxfp8": (
        "mxfp8",
        lambda *where: producer_folders.compressed_tensors(*where, {"MXFP8A16": ["Linear"]}),
    ),
    "ct-fp8": (
        "fp8-block",
        lambda *where: producer_folders.compressed_tensors(*where, {"FP8_BLOCK": ["Linear"]}),
    ),
    "ct-w4a16": (
        "int4-bf16",
        lambda *where: producer_folders.compressed_tensors(*where, {"W4A16": ["Linear"]}),
    ),
    "ct-w4a16-asym": (
        "int4-bf16",
        lambda *where: producer_folders.compressed_tensors(*where, {"W4A16_ASYM": ["Linear"]}),
    ),
    "ct-w8a16": (
        "int8-packed-bf16",
        lambda *where: producer_folders.compressed_tensors(*where, {"W8A16": ["Linear"]}),
    ),
    "ct-int8": (
        "int8-bf16",
        lambda *where: producer_folders.compressed_tensors(*where, {"INT8": ["Linear"]}),
    ),
    "ct-fp8-row": (
        "fp8-row-bf16",
        lambda *where: producer_folders.compressed_tensors(*where, {"FP8_DYNAMIC": ["Linear"]}),
    ),
    "ct-fp8-tensor": (
        "fp8-row-bf16",
        lambda *where: producer_folders.compressed_tensors(*where, {"FP8": ["Linear"]}),
    ),
    "modelopt-nvfp4": ("nvfp4", lambda *where: producer_folders.modelopt(*where, "NVFP4")),
    "modelopt-mxfp8": ("mxfp8", lambda *where: producer_folders.modelopt(*where, "MXFP8")),
    "modelopt-fp8": ("fp8-row-fp32", lambda *where: producer_folders.modelopt(*where, "FP8")),
    "modelopt-fp8-row": (
        "fp8-row-fp32",
        lambda *where: producer_folders.modelopt(*where, "FP8_PER_CHANNEL_PER_TOKEN"),
    ),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return producer_folders.make_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module", params=CASES)
def folder(request, source, tmp_path_factory):
    """A producer's folder, the format it must load as, and what the producer dequantises it to."""
    needed = {"c": "compressed_tensors", "m": "modelopt", "f": "transformers"}[request.param[0]]
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    format, write = CASES[request.param]
    path = tmp_path_factory.mktemp(request.param) / "model"
    return path, format, write(source, path)


def quantised(model):
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}


def stored_bytes(state, layer, names):
    found = [state[f"{layer}.{name}"] for name in names if f"{layer}.{name}" in state]
    return found[0].reshape(-1).view(torch.uint8)


def assert_same_packed(ours, other):
    assert ours.keys() == other.keys()
    for name, layer in ours.items():
        assert layer.format is other[name].format
        assert torch.equal(layer.values, other[name].values), name
        assert all(torch.equal(a, b) for a, b in zip(layer.scales, other[name].scales, strict=True)), name


def test_every_byte_is_the_files_and_mapped(folder):
    path, format, _ = folder
    model, state = mg.from_pretrained(path), tensors(path)
    layers = quantised(model)
    assert len(layers) == 13
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split()[0].split("-") for line in lines if line.endswith(".safetensors")]
    for name, layer in layers.items():
        assert layer.format.name == format
        want = [stored_bytes(state, name, names) for names in (VALUES, SCALES)]
        if layer.format.tensor_scale:
            want.append(stored_bytes(state, name, TENSOR_SCALES))
        elif f"{name}.weight_zero_point" in state:
            want.append(stored_bytes(state, name, ("weight_zero_point",)))
        for got, bytes_ in zip((layer.values, *layer.scales), want, strict=True):
            assert torch.equal(got.reshape(-1), bytes_), name
            assert any(int(begin, 16) <= got.data_ptr() < int(end, 16) for begin, end in mapped), name
        if f"{name}.bias" in state:
            assert torch.equal(layer.bias, state[f"{name}.bias"])
            assert layer.bias.abs().max() > 0
    for name in DENSE:
        layer = model.get_submodule(name)
        assert type(layer) is torch.nn.Linear
        assert torch.equal(layer.weight, state[f"{name}.weight"])
    assert torch.equal(model.model.norm.weight, state["model.norm.weight"])


def test_every_value_is_the_producers(folder, source):
    """Bit for bit in bf16, so that a base that loaded as zeros or without its scales cannot pass."""
    path, _, reference = folder
    dense = tensors(source)
    for name, layer in quantised(mg.from_pretrained(path)).items():
        got, want = layer.dequantize(), dense[f"{name}.weight"]
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, reference[name]), name
        assert 0 < (got - want).float().norm() < 0.2 * want.float().norm()


def test_saved_again_it_is_the_same(folder, tmp_path):
    """Keys and bytes of the weights, but no scales of activations; and the config says weights alone."""
    path, _, _ = folder
    model = mg.from_pretrained(path)
    model.save_pretrained(tmp_path)
    before, after = tensors(path), tensors(tmp_path)
    activations = (".input_scale", ".input_global_scale", ".input_zero_point")
    assert after.keys() == {name for name in before if not name.endswith(activations)}
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), before[name].reshape(-1).view(torch.uint8))
    again = mg.from_pretrained(tmp_path)
    assert_same_packed(quantised(model), quantised(again))
    assert "input_activations" not in json.dumps(again.config.to_dict()).replace(
        '"input_activations": null', ""
    )


def test_mixed_precision_and_other_dtypes(source, tmp_path):
    """Groups by layer; a dtype of the model that is not the file's reaches what is dense and nothing else."""
    pytest.importorskip("compressed_tensors")
    presets = {"FP8_BLOCK": ["re:.*self_attn.*"], "NVFP4A16": ["re:.*mlp.*"]}
    producer_folders.write_compressed_tensors(source, tmp_path, presets)
    model, state = mg.from_pretrained(tmp_path, dtype=torch.float32), tensors(tmp_path)
    for name, layer in quantised(model).items():
        assert layer.format.name == ("fp8-block" if "self_attn" in name else "nvfp4-divide")
        assert layer.dequantize().dtype == torch.float32
        assert torch.equal(layer.values.reshape(-1), stored_bytes(state, name, VALUES))
    assert model.lm_head.weight.dtype == model.model.norm.weight.dtype == torch.float32
    assert torch.equal(model.lm_head.weight, state["lm_head.weight"].float())
    model.save_pretrained(tmp_path / "again")
    assert_same_packed(quantised(model), quantised(mg.from_pretrained(tmp_path / "again")))


def test_modelopts_own_config_file_is_enough(source, tmp_path):
    if importlib.util.find_spec("modelopt") is None:
        pytest.skip("nvidia-modelopt is not installed")
    producer_folders.modelopt(source, tmp_path / "model", "NVFP4")
    producer_folders.only_hf_quant_config(tmp_path / "model", tmp_path / "other")
    one, other = (mg.from_pretrained(tmp_path / name) for name in ("model", "other"))
    assert len(quantised(other)) == 13
    assert_same_packed(quantised(one), quantised(other))
    other.save_pretrained(tmp_path / "again")
    assert_same_packed(quantised(one), quantised(mg.from_pretrained(tmp_path / "again")))


def blocks_by_definition(codes, scales):
    """DeepSeek's: the scale of element (i, j) is that of block (i // 128, j // 128)."""
    rows, cols = (torch.arange(size) // 128 for size in codes.shape)
    return codes.float() * scales.float()[rows][:, cols]


@pytest.mark.parametrize("scale", ["float32", "bfloat16", "e8m0"])
def test_fp8_tails_of_192_and_576(tmp_path, scale):
    """From a folder: the last blocks are partial, where transformers guesses other blocks."""
    source = producer_folders.make_source(tmp_path / "source", hidden_size=192, intermediate_size=576)
    state = tensors(source)
    for name in [name for name in state if name.endswith("_proj.weight")]:
        packed = mg.quantize(state[name], "fp8-block", rule="transformers", scale_type=scale)
        parts = Fp8Block().unpack(packed)
        state[name], state[f"{name}_scale_inv"] = parts["weight"], parts["weight_scale_inv"]
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    producer_folders.write_folder(source, tmp_path / "model", state, config)
    layers = quantised(mg.from_pretrained(tmp_path / "model"))
    assert {tuple(layer.weight.shape) for layer in layers.values()} == {
        *((192, 192), (96, 192), (576, 192), (192, 576))
    }
    for name, layer in layers.items():
        codes, scales = state[f"{name}.weight"], state[f"{name}.weight_scale_inv"]
        assert list(scales.shape) == [-(-size // 128) for size in codes.shape]
        assert torch.equal(layer.dequantize(torch.float32), blocks_by_definition(codes, scales))


def test_transformers_mxfp8(tmp_path, source):
    state = tensors(source)
    for name in [name for name in state if name.endswith("_proj.weight")]:
        packed = mg.quantize(state[name], "mxfp8")
        state |= {name: packed.values.view(torch.float8_e4m3fn), f"{name}_scale_inv": packed.scales[0]}
    config = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "activation_scheme": "dynamic"}
    producer_folders.write_folder(source, tmp_path, state, config)
    reference = producer_folders.linear_weights(
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    )
    layers = quantised(mg.from_pretrained(tmp_path))
    assert len(layers) == 14
    for name, layer in layers.items():
        assert layer.format.name == "mxfp8"
        assert torch.equal(layer.dequantize(), reference[name])
