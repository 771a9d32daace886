"""monograph inspect on folders that transformers, bitsandbytes and PEFT wrote."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open

from support.native_tool import run, run_json
from support.tiny_models import bnb_config, load, save_llama


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"))


def stored_bytes(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return sum(file.get_tensor(key).nbytes for key in file.keys())  # noqa: SIM118


def test_plain_folder_totals_are_those_of_the_file(llama):
    report = run_json("inspect", llama)
    assert report["total"]["bytes"] == stored_bytes(llama)
    assert set(report["by_format"]) == {"bf16"}
    assert list(report["by_layer"]) == ["", "model.layers.0", "model.layers.1"]
    names = [weight["name"] for weight in report["weights"]]
    assert names == sorted(names)
    text = run("inspect", llama).stdout
    assert "model.layers.1.mlp.up_proj.weight" in text
    assert "192 x 128" in text


@pytest.mark.parametrize(("quant_type", "double_quant"), [("nf4", True), ("fp4", False)])
def test_bitsandbytes_folder_is_recognised(llama, tmp_path, quant_type, double_quant):
    model = load(llama, quantization_config=bnb_config(quant_type, double_quant), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    report = run_json("inspect", tmp_path)
    assert report["total"]["bytes"] == stored_bytes(tmp_path)
    packed = [weight for weight in report["weights"] if weight["format"] == quant_type]
    assert len(packed) == 14
    for weight in packed:
        assert weight["double_quant"] == double_quant
        assert weight["block"] == [64]
        assert weight["dtype"] == "bf16"
        assert weight["readable"]
        assert len(weight["parts"]) == (6 if double_quant else 4)
    up = next(weight for weight in packed if "layers.0.mlp.up_proj" in weight["name"])
    assert up["shape"] == [192, 128]
    only = run_json("inspect", tmp_path, "--format", quant_type, "--name", "q_proj")
    assert [weight["name"] for weight in only["weights"]] == [
        f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)
    ]


def test_format_takes_what_is_printed_and_refuses_what_no_weight_can_have(llama, tmp_path):
    run("quantize", llama, tmp_path / "dq", "--double-quant")
    run("quantize", llama, tmp_path / "plain")
    for folder, counts in (("dq", {"nf4": 14, "nf4+dq": 14}), ("plain", {"nf4": 14, "nf4+dq": 0})):
        for name in run_json("inspect", tmp_path / folder)["by_format"]:
            assert run_json("inspect", tmp_path / folder, "--format", name)["total"]["tensors"] > 0
        for name, count in counts.items():
            assert run_json("inspect", tmp_path / folder, "--format", name)["total"]["tensors"] == count
    message = run("inspect", llama, "--format", "nf5", code=2).stderr
    assert "'nf5' is no format, wanted nf4, nf4+dq, fp4, fp4+dq, mxfp8, int8" in message
    assert "bf16" in message


def test_markdown_is_a_table(llama):
    lines = run("inspect", llama, "--markdown", "--no-tensors").stdout.splitlines()
    assert "| format | tensors | weights | bits | size |" in lines
    assert not any("up_proj" in line for line in lines)


def test_adapter_norms_are_those_of_the_product(llama, tmp_path):
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], use_rslora=True)
    config.alpha_pattern = {"down_proj": 3}
    config.rank_pattern = {"down_proj": 6}
    model = get_peft_model(load(llama), config)
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    adapter = run_json("inspect", tmp_path)["adapter"]
    assert adapter["r"] == 4
    assert sorted(adapter["target_modules"]) == ["down_proj", "q_proj"]
    assert len(adapter["modules"]) == 4
    for row in adapter["modules"]:
        layer = model.get_submodule(row["module"])
        delta = layer.get_delta_weight("default").double()
        assert row["rank"] == (6 if "down_proj" in row["module"] else 4)
        assert row["norm_change"] == pytest.approx(delta.norm().item(), rel=1e-2)
        a = layer.lora_A["default"].weight.double()
        assert row["norm_a"] == pytest.approx(a.norm().item(), rel=1e-6)
    text = run("inspect", tmp_path).stdout
    assert "model.layers.0.mlp.down_proj" in text
    assert "use_rslora" in text


def test_a_name_with_terminal_escapes_is_not_printed_raw(tmp_path):
    header = json.dumps({"a\x1b[31m": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    assert "\x1b" not in run("inspect", file).stdout
    assert run_json("inspect", file)["weights"][0]["name"] == "a\x1b[31m"


def test_a_missing_folder_is_exit_code_5_and_a_bad_regex_2(llama, tmp_path):
    assert "No such file" in run("inspect", tmp_path / "nowhere", code=5).stderr
    assert "not a regular expression" in run("inspect", llama, "--name", "(", code=2).stderr
