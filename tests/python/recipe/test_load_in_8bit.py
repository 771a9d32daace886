"""load_in_8bit: the int8 base by row, the notice of what it is not, and what does not go with it."""

import json

import pytest
import torch

import monograph as mg
from monograph.__main__ import main
from monograph.recipe import ConfigError, check_keys
from monograph.recipe.config.base_bits import INT8_NOTICE
from monograph.recipe.run.base_fingerprint import packing_of
from monograph.recipe.run.load_model import load_base
from monograph.recipe.run.run_identity import run_identity
from support.native_tool import run, run_json
from support.producer_folders import tensors
from support.recipe_files import make_instruction_world, make_model, small_recipe, write_jsonl


@pytest.fixture
def keys(tmp_path):
    make_model(tmp_path / "model")
    write_jsonl(tmp_path / "train.jsonl", [{"instruction": "a", "output": "b"}])
    return small_recipe(tmp_path, "alpaca", adapter="lora", load_in_8bit=True)


def test_the_base_is_int8_by_row_and_a_notice_says_what_differs(keys, tmp_path):
    read = check_keys(keys)
    assert INT8_NOTICE in read.notices
    assert "weights alone" in INT8_NOTICE
    assert "outliers" in INT8_NOTICE
    model = load_base(read.recipe, str(tmp_path / "model"))
    stored = tensors(tmp_path / "model")
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, mg.nn.QuantLinear)}
    assert len(layers) == 14
    for name, layer in layers.items():
        want = mg.quantize(stored[f"{name}.weight"], "int8", block_size=0)
        assert layer.format.name == "int8-packed-bf16"
        assert torch.equal(layer.values, want.values)
        assert torch.equal(layer.scales[0], want.scales[0])
    found = packing_of(model)
    assert (found["format"], found["block"], found["rule"]) == ("int8", 0, "default")


def test_what_does_not_go_with_it(keys, tmp_path):
    def errors(**changes):
        with pytest.raises(ConfigError) as caught:
            check_keys(keys | changes)
        return caught.value.errors

    assert errors(adapter="qlora") == [
        "adapter is qlora and load_in_8bit true; write adapter: lora for an int8 base"
    ]
    whole = errors(adapter=None, trainer="trl", lora_r=None)
    assert "load_in_8bit: packed weights are not trained themselves; write adapter: lora" in whole
    assert not [notice for notice in check_keys(keys | {"load_in_8bit": False}).notices if "8bit" in notice]
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"a": 1}}))
    assert "load_in_8bit: base_model is quantised already and stays as it is" in check_keys(keys).notices


def test_a_run_of_16_bits_is_another(keys):
    eight, sixteen = (run_identity(check_keys(k).recipe) for k in (keys, keys | {"load_in_8bit": None}))
    assert eight["adapter"] == "lora with load_in_8bit"
    assert sixteen["adapter"] == "lora"
    assert {name for name in eight if eight[name] != sixteen.get(name)} == {"adapter"}


@pytest.mark.slow
def test_merging_names_the_way_to_the_int8_folder(tmp_path, capsys):
    root, path, out = make_instruction_world(tmp_path), tmp_path / "recipe.yml", tmp_path / "out"
    eight = {"adapter": "lora", "load_in_8bit": True, "torch_compile": False}
    path.write_text(json.dumps(small_recipe(root, "instruction", output_dir=str(out), max_steps=1, **eight)))
    assert main(["train", str(path)]) == 0
    assert main(["merge", str(path)]) == 3
    message = capsys.readouterr().err
    assert f"`monograph quantize {tmp_path / 'model'} B8 --to int8`" in message
    assert f"`monograph merge B8 --adapter {out} --out merged`" in message
    # That way, as it is written.
    run("quantize", tmp_path / "model", tmp_path / "b8", "--to", "int8")
    run("merge", tmp_path / "b8", "--adapter", out, "--out", tmp_path / "merged")
    assert run_json("verify", tmp_path / "merged")["findings"] == []
