"""MonographConfig for the element formats: quantised while loading, saved as libraries load it, merged."""

import json

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

import monograph as mg
from monograph.nn import QuantLinear
from support import producer_folders
from support.producer_folders import tensors

# Argument of MonographConfig: format of the layers, and the preset of compressed-tensors it is saved as.
CASES = {
    "fp8-block": ("fp8-block", None),
    "mxfp8": ("mxfp8", "MXFP8A16"),
    "mxfp4": ("mxfp4", "MXFP4A16"),
    "nvfp4": ("nvfp4-divide", "NVFP4A16"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return producer_folders.make_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module", params=CASES)
def saved(request, source, tmp_path_factory):
    """The argument, the model quantised while loading, and its folder."""
    config = mg.MonographConfig(request.param, skip_modules=["lm_head", "layers.0.mlp.down_proj"])
    model = mg.from_pretrained(source, config)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return request.param, model, folder


def quantised(model):
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}


def test_quantised_while_loading_is_the_sources_quantisation(saved, source):
    name, model, _ = saved
    format, stored = CASES[name][0], tensors(source)
    layers = quantised(model)
    assert len(layers) == 13
    for path, layer in layers.items():
        want = mg.quantize(stored[f"{path}.weight"], format)
        assert layer.format.name == format
        assert torch.equal(layer.values, want.values)
        assert all(torch.equal(a, b) for a, b in zip(layer.scales, want.scales, strict=True))
        weight = stored[f"{path}.weight"].float()
        assert 0 < (layer.dequantize(torch.float32) - weight).norm() < 0.2 * weight.norm()
    assert torch.equal(model.lm_head.weight, stored["lm_head.weight"])


def test_the_saved_folder_loads_bit_for_bit(saved):
    _, model, folder = saved
    again = mg.from_pretrained(folder)
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    ids = torch.arange(24)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)


def test_transformers_loads_the_saved_folder_with_the_same_values(saved):
    """Dequantised to bf16 by transformers or compressed-tensors; bit for bit."""
    name, model, folder = saved
    options = {}
    if name != "fp8-block":
        pytest.importorskip("compressed_tensors")
        from transformers import CompressedTensorsConfig

        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)
    dense = producer_folders.linear_weights(reference)
    for path, layer in quantised(model).items():
        assert torch.equal(layer.dequantize(), dense[path]), path
    for path in ("lm_head", "model.layers.0.mlp.down_proj"):
        assert torch.equal(model.get_submodule(path).weight, dense[path])


def test_the_saved_config_is_the_librarys(saved):
    name, _, folder = saved
    stored = json.loads((folder / "config.json").read_text())["quantization_config"]
    dense = ["model.layers.0.mlp.down_proj", "lm_head"]
    if name == "fp8-block":
        assert stored == FineGrainedFP8Config(modules_to_not_convert=dense).to_dict() | {
            "weight_block_size": [128, 128]
        }
        return
    quantization = pytest.importorskip("compressed_tensors.quantization")
    scheme = quantization.preset_name_to_scheme(CASES[name][1], ["Linear"])
    config = quantization.QuantizationConfig(
        config_groups={"group_0": scheme}, quantization_status="compressed", ignore=dense
    )
    want = config.model_dump(mode="json")
    want["config_groups"]["group_0"]["format"] = want["format"] = stored["format"]
    assert stored == {key: value for key, value in want.items() if key != "moe_sparsity_config"}


@pytest.mark.parametrize("scale_type", ["bfloat16", "e8m0"])
def test_other_scales_of_fp8_are_saved_as_they_are(source, tmp_path, scale_type):
    model = mg.from_pretrained(source, mg.MonographConfig("fp8-block", scale_type=scale_type))
    model.save_pretrained(tmp_path)
    again = mg.from_pretrained(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    dense = producer_folders.linear_weights(reference)
    kind = {"bfloat16": torch.bfloat16, "e8m0": torch.float8_e8m0fnu}[scale_type]
    scales = [tensor for name, tensor in tensors(tmp_path).items() if name.endswith("_scale_inv")]
    assert len(scales) == 14
    assert all(tensor.dtype == kind for tensor in scales)
    for path, layer in quantised(model).items():
        assert torch.equal(layer.block_scales, quantised(again)[path].block_scales)
        assert torch.equal(layer.dequantize(), dense[path])


def test_merged_dequantised_and_partly_merged(saved, tmp_path):
    """Layers with a merged adapter are dense, and the config then names them; the rest stays packed."""
    _, _, folder = saved
    ids = torch.arange(24)[None]
    config = LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = mg.from_pretrained(folder, dtype=torch.float32)
    # Compared with a model that has no adapter.
    wrapped = mg.add_lora(model, config, elementwise=False, head=False)
    with torch.no_grad():
        want = wrapped(ids).logits
        merged = wrapped.merge_and_unload()
        assert (merged(ids).logits - want).norm() <= 2**-12 * want.norm()
    assert len(quantised(merged)) == 9
    merged.save_pretrained(tmp_path)
    again = mg.from_pretrained(tmp_path, dtype=torch.float32)
    assert quantised(again).keys() == quantised(merged).keys()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, merged(ids).logits)
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    listed = stored.get("ignore") or stored.get("modules_to_not_convert")
    assert {"lm_head", "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj"} <= set(listed)
    packed = quantised(mg.from_pretrained(folder))
    dense = mg.from_pretrained(folder).dequantize()
    assert not quantised(dense)
    for path, layer in packed.items():
        assert torch.equal(dense.get_submodule(path).weight, layer.dequantize())


def test_misuse_is_named():
    with pytest.raises(ValueError, match="double_quant is True, format mxfp4 has none"):
        mg.MonographConfig("mxfp4", double_quant=True)
    with pytest.raises(ValueError, match="block size is 64, format mxfp8 wants one of"):
        mg.MonographConfig("mxfp8", block_size=64)
    with pytest.raises(ValueError, match="scale type is 'bfloat16', format nvfp4-divide wants one of e4m3"):
        mg.MonographConfig("nvfp4", scale_type="bfloat16")
    with pytest.raises(ValueError, match="rule is 'floor', format fp8-block wants one of default"):
        mg.MonographConfig("fp8-block", rule="floor")
