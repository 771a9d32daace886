"""`monograph convert`: GPTQ, AutoRound and AWQ turned into compressed-tensors' rows, value for value."""

import json

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

import monograph as mg
from monograph.nn import QuantLinear
from monograph.training import TrainStep
from support import producer_folders
from support.native_tool import run, run_json
from support.producer_folders import linear_weights, tensors
from support.word_folders import Words, write_words

CASES = {
    "gptq": Words(),
    "gptq-symmetric": Words(symmetric=True),
    "gptq-row": Words(group=-1),
    "gptq-8-bits": Words(bits=8, group=128),
    "gptq-v2": Words(settings={"checkpoint_format": "gptq_v2"}),
    "gptq-v2-new-name": Words(settings={"format": "gptq_v2"}),
    "auto-round": Words("auto-round", settings={"packing_format": "auto_round"}),
    "auto-round-gptq": Words("auto-round", settings={"packing_format": "auto_round:auto_gptq"}),
    "auto-round-awq": Words("auto-round", settings={"packing_format": "auto_round:auto_awq"}),
    "awq": Words("awq", settings={"version": "gemm", "zero_point": True}),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return producer_folders.make_source(tmp_path_factory.mktemp("source"))


@pytest.mark.parametrize("case", CASES)
def test_values_stay_the_same(tmp_path, source, case):
    words = CASES[case]
    dense = write_words(source, tmp_path / "words", words)
    run("convert", tmp_path / "words", tmp_path / "rows", "--quiet")
    run("verify", tmp_path / "rows")
    found = {w["name"]: w for w in run_json("inspect", tmp_path / "rows")["weights"]}
    assert len(dense) == 13
    assert {found[f"{name}.weight"]["format"] for name in dense} == {f"int{words.bits}"}
    has_zeros = any(name.endswith("weight_zero_point") for name in tensors(tmp_path / "rows"))
    assert has_zeros is not words.symmetric
    run("dequantize", tmp_path / "rows", tmp_path / "plain", "--to", "fp32", "--quiet")
    plain = tensors(tmp_path / "plain")
    assert all(torch.equal(plain[f"{name}.weight"], weight) for name, weight in dense.items())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_compressed_tensors_reads_the_same_values(tmp_path, source, case):
    pytest.importorskip("compressed_tensors")
    dense = write_words(source, tmp_path / "words", CASES[case])
    run("convert", tmp_path / "words", tmp_path / "rows", "--quiet")
    options = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "rows", quantization_config=options, dtype=torch.float16
    )
    theirs = linear_weights(model)
    assert all(torch.equal(theirs[name], weight.half()) for name, weight in dense.items())


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gptq", "awq"])
def test_a_turned_base_is_trained(tmp_path, source, case):
    dense = write_words(source, tmp_path / "words", CASES[case])
    run("convert", tmp_path / "words", tmp_path / "rows", "--quiet")
    torch.manual_seed(0)
    model = mg.add_lora(mg.from_pretrained(tmp_path / "rows"), LoraConfig(r=4, target_modules="all-linear"))
    layers = [layer for layer in model.modules() if isinstance(layer, QuantLinear)]
    assert len(layers) == len(dense)
    ids = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))
    step = TrainStep(model)
    losses = [step([{"input_ids": ids, "labels": ids}], 5e-3).loss.item() for _ in range(8)]
    assert losses[-1] < 0.99 * losses[0], losses


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 3}, "bits is 3, wanted 4 or 8"),
        ({"group_size": 32}, "group_size is 32, and scales reach over 64 inputs"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', wanted gptq or gptq_v2"),
        ({"format": "marlin"}, "format is 'marlin', wanted gptq or gptq_v2"),
        ({"format": "gptq_v2", "checkpoint_format": "gptq"}, "is 'gptq' and format is 'gptq_v2', wanted one"),
        ({"sym": True}, "says symmetric, and a zero point is not the middle code"),
        ({"bits": None}, "bits is null, wanted 4 or 8"),
        ({"bits": "4"}, "bits is '4', wanted 4 or 8"),
        ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv', wanted gemm"),
        ({"quant_method": "hqq"}, "quant_method is 'hqq', wanted gptq, awq or auto-round"),
    ],
)
def test_what_cannot_be_turned_is_named(tmp_path, source, settings, message):
    write_words(source, tmp_path / "words", Words())
    path = tmp_path / "words" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= settings
    path.write_text(json.dumps(config))
    done = run("convert", tmp_path / "words", tmp_path / "rows", code=3)
    assert message in done.stderr
    assert not (tmp_path / "rows").exists()


def test_a_folder_without_words_is_named(tmp_path, source):
    done = run("convert", source, tmp_path / "rows", code=3)
    assert "holds no GPTQ, AWQ or AutoRound weight" in done.stderr


def change(folder, edit):
    path = folder / "model.safetensors"
    state = load_file(path)
    edit(state)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
def test_a_weight_that_lacks_a_part_is_not_left_behind(tmp_path, source, part):
    write_words(source, tmp_path / "words", Words())
    change(tmp_path / "words", lambda state: state.pop(f"model.layers.1.self_attn.q_proj.{part}"))
    done = run("convert", tmp_path / "words", tmp_path / "rows", code=3)
    assert "model.layers.1.self_attn.q_proj" in done.stderr
    assert "its weight lacks a part" in done.stderr


def test_words_of_64_bits_are_not_left_behind(tmp_path, source):
    write_words(source, tmp_path / "words", Words())
    name = "model.layers.1.self_attn.q_proj.qweight"
    change(tmp_path / "words", lambda state: state.update({name: state[name].long()}))
    assert "its weight lacks a part" in run("convert", tmp_path / "words", tmp_path / "rows", code=3).stderr


def test_what_is_no_linear_layer_is_named(tmp_path, source):
    write_words(source, tmp_path / "words", Words())
    old, new = "model.layers.1.self_attn.q_proj", "model.embed_tokens_per_layer"
    parts = ("qweight", "qzeros", "scales", "g_idx")
    change(
        tmp_path / "words",
        lambda state: state.update({f"{new}.{part}": state.pop(f"{old}.{part}") for part in parts}),
    )
    done = run("convert", tmp_path / "words", tmp_path / "rows", code=3)
    assert f"{new}.weight: an embedding in gptq is not supported" in done.stderr


def test_a_second_config_that_contradicts_is_named(tmp_path, source):
    write_words(source, tmp_path / "words", Words())
    path = tmp_path / "words" / "quantize_config.json"
    path.write_text(json.dumps({"bits": 4, "checkpoint_format": "gptq_v2"}))
    done = run("convert", tmp_path / "words", tmp_path / "rows", code=3)
    assert "checkpoint_format is 'gptq_v2', and config.json means 'gptq'" in done.stderr
    path.write_text(json.dumps({"bits": 4}))
    run("convert", tmp_path / "words", tmp_path / "rows", "--quiet")
