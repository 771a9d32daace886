"""from_pretrained refuses what it cannot read, and names what it found and what it wanted."""

import json
import re

import pytest
import torch

import monograph as mg
from monograph.hf.transformers.expert_loading import stacked
from monograph.quant.quant_methods.compressed_tensors import CompressedTensors
from monograph.quant.quant_methods.fp8_block import Fp8Block
from monograph.quant.quant_methods.modelopt import ModelOpt
from support import producer_folders
from support.native_tool import run
from support.producer_folders import tensors


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return producer_folders.make_source(tmp_path_factory.mktemp("source"))


WEIGHTS = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": 16, "strategy": "tensor_group"}
GOOD_CT = {
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
}


def with_weights(**change):
    return GOOD_CT | {"config_groups": {"group_0": {"weights": WEIGHTS | change}}}


REFUSED = {
    "gptq": ({"quant_method": "gptq"}, "'gptq': turn the folder first: monograph convert FOLDER OUT"),
    "quanto": ({"quant_method": "quanto"}, "quant_method is 'quanto', wanted one of bitsandbytes, fp8"),
    "bnb-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "load_in_4bit is not set"),
    "fp8-tensor": ({"quant_method": "fp8", "weight_block_size": None}, "one scale per tensor or row, wanted"),
    "fp8-64": ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"\[64, 64\], wanted \[128, 128\]"),
    "fp8-e5m2": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"},
        "fmt is 'e5m2', wanted 'e4m3'",
    ),
    "fp8-embedding": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_convert": ["embed_tokens"]},
        "modules_to_convert is .*wanted linear layers alone",
    ),
    "ct-int3": (
        with_weights(type="int", num_bits=3, group_size=128, strategy="group"),
        "'num_bits': 3.*wanted symmetric float.*or int of 4 or 8 bits",
    ),
    "ct-actorder": (
        with_weights(type="int", group_size=128, strategy="group", actorder="group"),
        "actorder is 'group', wanted none or 'weight': weight_g_idx is not read",
    ),
    "ct-int-block": (
        with_weights(type="int", group_size=None, strategy="block", block_structure=[128, 128]),
        r"'strategy': 'block'.*'block_structure': \[128, 128\]",
    ),
    "ct-channel": (with_weights(strategy="channel", group_size=None), "'strategy': 'channel'"),
    "ct-asymmetric": (with_weights(symmetric=False), "'symmetric': False"),
    "ct-frozen": (GOOD_CT | {"quantization_status": "frozen"}, "is 'frozen', wanted 'compressed'"),
    "ct-rotated": (GOOD_CT | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config is"),
    "ct-sparse": (GOOD_CT | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is"),
    "ct-none": (GOOD_CT | {"config_groups": {}}, "no group with weights"),
    "mo-w4a8": (
        {"quant_method": "modelopt", "quant_algo": "W4A8_NVFP4_FP8"},
        "quant_algo is W4A8_NVFP4_FP8, wanted",
    ),
    "mo-awq": ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo is NVFP4_AWQ, wanted"),
    "mo-int8": (
        {"quant_method": "modelopt", "quantization": {"quant_algo": "W8A16"}},
        "quant_algo is W8A16, wanted",
    ),
    "mo-fp8-group": ({"quant_method": "modelopt", "quant_algo": "FP8", "group_size": 128}, "wanted none"),
    "mo-group": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "is 32, wanted 16"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_schemes_are_refused_before_a_tensor_is_read(source, tmp_path, case):
    config, message = REFUSED[case]
    content = json.loads((source / "config.json").read_text()) | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        mg.from_pretrained(tmp_path)


def test_tensors_that_do_not_fit_are_refused(source, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    fp8, nvfp4 = (mg.quantize(tensors(source)[name], format) for format in ("fp8-block", "nvfp4-divide"))
    good, nibbles = Fp8Block().unpack(fp8), CompressedTensors().unpack(nvfp4)
    codes, scales = good["weight"], good["weight_scale_inv"]
    wrong = [
        (Fp8Block(), {"weight": codes}, "wanted weight and weight_scale_inv"),
        (
            Fp8Block(),
            good | {"weight_scale_inv": scales[:1]},
            r"scales have the shape \[1, 2\].*wants \[3, 2\]",
        ),
        (Fp8Block(), good | {"weight_scale_inv": scales.half()}, "scales are torch.float16"),
        (Fp8Block(), good | {"weight": codes.bfloat16()}, "is torch.bfloat16 beside weight_scale_inv"),
        (Fp8Block(), good | {"weight": codes[None, None]}, "wanted two dimensions or three"),
        (CompressedTensors(), {"weight": codes}, r"found \['weight'\], wanted weight_packed or weight"),
        (CompressedTensors(), nibbles | {"weight_zero_point": scales}, "no zero point"),
        (CompressedTensors(), nibbles | {"weight_global_scale": scales}, r"tensor scale is \[3, 2\]"),
        (CompressedTensors(), nibbles | {"weight_scale": scales}, "scales are torch.float32, format nvfp4"),
        (CompressedTensors(), nibbles | {"weight_packed": codes.bfloat16()}, "wanted torch.uint8"),
        (CompressedTensors(), nibbles | {"weight_g_idx": scales}, "columns in another order; wanted none"),
        (ModelOpt(), {"weight": nvfp4.values, "weight_scale": nibbles["weight_scale"]}, "scale is missing"),
        (ModelOpt(), {"weight": codes.bfloat16(), "pre_quant_scale": scales}, "pre_quant_scale"),
        (ModelOpt(), {"weight": nvfp4.values}, "wanted weight and weight_scale"),
    ]
    for method, parts, message in wrong:
        with pytest.raises(ValueError, match=message):
            method.pack(parts, torch.bfloat16)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    producer_folders.write_folder(source, tmp_path, tensors(source) | {name: codes}, config)
    with pytest.raises(RuntimeError, match="conversion"):  # transformers collects the errors, and prints ours
        mg.from_pretrained(tmp_path)


def test_mixed_fp8_of_modelopt_is_not_saved():
    """FP8 without the scales of activations has no name there; alone it is saved as compressed-tensors."""
    layers = {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4", "group_size": 16}}
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    assert ModelOpt().formats(mixed) == ["fp8-row-fp32", "nvfp4"]
    with pytest.raises(ValueError, match="quantized_layers mixes FP8, NVFP4"):
        ModelOpt().check_saved(mixed)
    ModelOpt().check_saved(mixed | {"quantized_layers": {"b": layers["b"]}})
    alone = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "model.layers.0*"]}
    ModelOpt().check_saved(alone)
    again = ModelOpt().saved_again(alone, ["x"])
    assert again["quant_method"] == "compressed-tensors"
    name, pattern, added = again["ignore"]
    assert (name, added) == ("lm_head", "x")
    assert re.match(pattern.removeprefix("re:"), "model.layers.0.mlp.down_proj")
    assert not re.match(pattern.removeprefix("re:"), "model.layers.1.mlp.down_proj")


def test_packed_experts_without_their_scales_are_refused(tmp_path):
    """Their codes would else be cast to numbers without scales."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "num_experts": 2}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_experts_per_tok=1, mlp_only_layers=[]))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "source")
    state = tensors(tmp_path / "source")
    for name in [name for name in state if ".experts." in name]:
        packed = mg.quantize(state[name], "fp8-block")
        state[name] = packed.values.view(torch.float8_e4m3fn)
        if not name.endswith("experts.1.up_proj.weight"):
            state[f"{name}_scale_inv"] = packed.scales[0].view(torch.float32)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    producer_folders.write_folder(tmp_path / "source", tmp_path / "model", state, config)
    with pytest.raises(
        RuntimeError, match="issues during automatic conversion"
    ):  # transformers' report has it
        mg.from_pretrained(tmp_path / "model")
    source = "experts.*.up_proj.weight"
    short = {source: [packed.values] * 2, f"{source}_scale_inv": [packed.scales[0]]}
    with pytest.raises(ValueError, match=r"experts have .*weight_scale_inv': 1.*wanted as many of each"):
        stacked(Fp8Block(), {}, short, torch.bfloat16)


def test_zero_points_that_the_config_speaks_of_are_there(source, tmp_path):
    """Else an asymmetric weight would be read as a symmetric one, by the package and by the tool."""
    pytest.importorskip("compressed_tensors")
    producer_folders.write_compressed_tensors(source, tmp_path / "made", {"W4A16_ASYM": ["Linear"]})
    state = tensors(tmp_path / "made")
    dropped = "model.layers.1.mlp.up_proj.weight_zero_point"
    config = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    producer_folders.write_folder(source, tmp_path / "whole", state, config)
    run("verify", tmp_path / "whole")
    del state[dropped]
    producer_folders.write_folder(source, tmp_path / "model", state, config)
    with pytest.raises(RuntimeError, match="issues during automatic conversion"):
        mg.from_pretrained(tmp_path / "model")
    parts = {name: state[f"{dropped.removesuffix('weight_zero_point')}{name}"] for name in ("weight_packed",)}
    parts |= {"weight_shape": torch.tensor([384, 256]), "weight_scale": torch.ones(384, 2)}
    with pytest.raises(ValueError, match="symmetric: false, wanted weight_zero_point; there is none"):
        CompressedTensors().check_parts(config, parts)
    said = run("verify", tmp_path / "model", code=3).stderr
    assert "there is no zero_point, and config_groups says symmetric: false" in said
