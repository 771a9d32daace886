"""MonographConfig("int4"), ("int8") and ("fp8"): the tool's folder bit by bit, saved, loaded and trained."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model

import monograph as mg
from monograph.nn import QuantLinear
from support import producer_folders
from support.native_tool import run
from support.producer_folders import tensors

SKIPPED = ["lm_head", "layers.0.mlp.down_proj"]
# Arguments of MonographConfig, and the tool's options.
CASES = {
    "int4": ({"block_size": 128}, []),
    "int4-row": ({"block_size": 0}, ["--block-size", "0"]),
    "int4-asymmetric": ({"block_size": 32, "symmetric": False}, ["--block-size", "32", "--asymmetric"]),
    "int8": ({}, []),
    "int8-asymmetric": ({"symmetric": False}, ["--asymmetric"]),
    "fp8": ({}, []),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return producer_folders.make_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module", params=CASES)
def loaded(request, source, tmp_path_factory):
    """The model quantised while it loads, the folder it was saved to, and the tool's."""
    code = request.param.split("-")[0]
    arguments, options = CASES[request.param]
    model = mg.from_pretrained(source, mg.MonographConfig(code, skip_modules=SKIPPED, **arguments))
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder / "saved")
    run(
        "quantize", source, folder / "tool", "--to", code, "--exclude", r"layers\.0\.mlp\.down_proj", *options
    )
    return model, folder


def quantised(model):
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}


def test_the_bytes_are_those_of_the_tools_folder(loaded):
    model, folder = loaded
    saved, tool = tensors(folder / "saved"), tensors(folder / "tool")
    assert len(quantised(model)) == 13
    assert saved.keys() == tool.keys()
    for name, tensor in saved.items():
        assert tensor.dtype == tool[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), tool[name].view(torch.uint8)), name
    configs = [
        json.loads((folder / which / "config.json").read_text())["quantization_config"]
        for which in ("saved", "tool")
    ]
    groups = [config["config_groups"]["group_0"] for config in configs]
    assert groups[0] == groups[1]
    assert configs[0]["format"] == configs[1]["format"]
    assert set(configs[0]["ignore"]) == set(configs[1]["ignore"])


def test_the_folders_load_bit_for_bit(loaded):
    model, folder = loaded
    before, ids = model.state_dict(), torch.arange(24)[None]
    for which in ("saved", "tool"):
        again = mg.from_pretrained(folder / which)
        after = again.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        with torch.no_grad():
            assert torch.equal(model(ids).logits, again(ids).logits)


def test_gradients_of_lora_are_those_on_the_dequantised_base(loaded):
    """Bit by bit: our operators read both, and the packed base decodes to the weights of the other."""
    _, folder = loaded
    run("dequantize", folder / "tool", folder / "plain", "--quiet", "--force")
    grads = []
    for base in (mg.from_pretrained(folder / "tool"), mg.from_pretrained(folder / "plain")):
        torch.manual_seed(0)
        adapted = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"))
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
        mg.optimize(adapted)
        ids = torch.arange(48).reshape(2, 24)
        adapted(input_ids=ids, labels=ids).loss.backward()
        grads.append({n: p.grad for n, p in adapted.named_parameters() if p.requires_grad})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        assert torch.isfinite(grad).all()
        assert torch.equal(grad, grads[1][name]), name


def test_refusals(source):
    def refused(*arguments, **named):
        with pytest.raises((ValueError, TypeError)) as error:
            mg.MonographConfig(*arguments, **named)
        return str(error.value)

    assert "format is 'int4-bf16', wanted 'int4'" in refused("int4-bf16")
    assert "format is 'int8-packed-fp16', wanted 'int8'" in refused("int8-packed-fp16")
    assert "symmetric is False, format nf4 has no zero points" in refused("nf4", symmetric=False)
    assert "symmetric is False, format fp8-row-bf16 has no zero points" in refused("fp8", symmetric=False)
    assert "block_size is 64, fp8 wants 0" in refused("fp8", block_size=64)
    assert "block size is -1" in refused("int4", block_size=-1)
    for symmetric in ("no", None, 0):
        assert f"symmetric is {symmetric!r}, wanted True or False" in refused("int4", symmetric=symmetric)
    for block in (True, 32.0, "128"):
        assert f"block size is {block!r}, wanted a whole number" in refused("int4", block_size=block)
    assert "int4 has none" in refused("int4", double_quant=True)
    with pytest.raises(RuntimeError):  # transformers' own; its report has ours
        mg.from_pretrained(source, mg.MonographConfig("int4", block_size=100))


def test_packed_tensors_without_a_config_are_named(source, tmp_path):
    run("quantize", source, tmp_path / "int4", "--to", "int4", "--block-size", "32")
    config = tmp_path / "int4" / "config.json"
    kept = json.loads(config.read_text())
    del kept["quantization_config"]
    config.write_text(json.dumps(kept))
    with pytest.raises(
        ValueError, match=r"weight_packed belongs to a packed weight, and config\.json has no"
    ):
        mg.from_pretrained(tmp_path / "int4")
