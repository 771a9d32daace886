"""load_in_8bit: the int8 base by row, the notice of what it is not, and what does not go with it."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

import monograph as mg
from monograph.__main__ import main
from monograph.cli import native
from monograph.recipe import ConfigError, check_keys
from monograph.recipe.config.base_bits import INT8_NOTICE
from monograph.recipe.run.base_fingerprint import packing_of
from monograph.recipe.run.load_model import load_base
from monograph.recipe.run.run_identity import run_identity
from support.native_tool import run, run_json
from support.producer_folders import tensors
from support.quantised_merges import check, expected
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


def train(root, **keys):
    make_instruction_world(root)
    keys |= {"torch_compile": False, "max_steps": 3}
    recipe = small_recipe(root, "instruction", output_dir=str(root / "out"), **keys)
    (root / "recipe.yml").write_text(json.dumps(recipe))
    assert main(["train", str(root / "recipe.yml")]) == 0
    return root


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tmp_path_factory.mktemp("trained"), adapter="lora", load_in_8bit=True)


@pytest.fixture
def called(monkeypatch):
    """The calls of the native program, which is run beside this process instead of in its place."""
    calls = []
    monkeypatch.setattr(native, "exec_native", lambda words: calls.append(words) or run(*words).returncode)
    return calls


@pytest.mark.slow
def test_a_recipe_merges_into_the_int8_base_in_float64_rounded_once(trained, called, tmp_path):
    out = trained / "out"
    assert main(["merge", str(trained / "recipe.yml")]) == 0
    assert called[0][-5:] == ["dequantized", "--as", "int8", "--as-block-size", "0"]
    settings = json.loads((out / "adapter_config.json").read_text())
    base = {name: weight for name, weight in tensors(trained / "model").items() if "_proj." in name}
    base = {
        name: mg.quantize(weight, "int8", block_size=0).dequantize(torch.bfloat16)
        for name, weight in base.items()
    }
    adapter = tensors(out)
    wanted = expected(base, adapter, settings["lora_alpha"] / settings["r"])
    changed = [name for name in base if (base[name].double() != torch.from_numpy(wanted[name])).any()]
    assert len(changed) == len(adapter) // 2 > 0
    check(trained / "out-merged", wanted)
    # The adapter records all of it: the native program alone, from either base, to the same bytes.
    run("quantize", trained / "model", tmp_path / "b8", "--to", "int8")
    for name, folder in (("dense", trained / "model"), ("packed", tmp_path / "b8")):
        run("merge", folder, "--adapter", out, "--out", tmp_path / name)
        found, first = tensors(tmp_path / name), tensors(trained / "out-merged")
        assert found.keys() == first.keys()
        assert all(torch.equal(found[key], first[key]) for key in found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_base_that_becomes_other_values_than_training_had_is_refused(trained, tmp_path, kind):
    """Training rounds an fp32 folder to bf16 before it is quantised; `--as` takes it as it is stored."""
    if kind == "nf4":
        trained = train(tmp_path / "nf4", adapter="qlora", load_in_4bit=True)
    torch.manual_seed(0)
    wide = {
        name: tensor.float() * (1 + torch.rand(tensor.shape) * 2**-8)
        for name, tensor in tensors(trained / "model").items()
    }
    shutil.copytree(trained / "model", tmp_path / "wide")
    save_file(wide, tmp_path / "wide" / "model.safetensors", {"format": "pt"})
    shutil.copytree(trained / "out", tmp_path / "adapter")
    record = tmp_path / "adapter" / "monograph.json"
    written = json.loads(record.read_text())
    written["base"]["sha256"] = run_json("inspect", tmp_path / "wide", "--hash")["sha256"]
    record.write_text(json.dumps(written))
    merge = ["merge", tmp_path / "wide", "--adapter", tmp_path / "adapter", "--out", tmp_path / "out"]
    message = run(*merge, code=3).stderr
    assert "was trained on packed values with hash " + written["base"]["packed"]["values_sha256"] in message
    assert not (tmp_path / "out").exists()
    assert "--as makes others" in run(*merge, "--another-base").stderr
