"""A GPTQ base with act-order (desc_act), turned by `monograph convert`: loaded, trained, merged, saved."""

import json

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import monograph as mg
from monograph.nn import QuantLinear
from monograph.training import TrainStep
from support import producer_folders
from support.native_tool import run
from support.producer_folders import tensors
from support.word_folders import Words, write_words

pytestmark = pytest.mark.slow

WORDS = Words(act_order=True, settings={"desc_act": True})


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(folder, values in fp32)."""
    folder = tmp_path_factory.mktemp("act_order")
    source = producer_folders.make_source(folder / "source")
    dense = write_words(source, folder / "words", WORDS)
    run("convert", folder / "words", folder / "rows", "--quiet")
    return folder / "rows", dense


def packed_layers(model):
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}


def batch():
    ids = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def test_a_folder_loads_with_its_order(base, tmp_path):
    folder, dense = base
    model = mg.from_pretrained(folder)
    layers = packed_layers(model)
    assert layers.keys() == dense.keys()
    for name, layer in layers.items():
        assert layer.columns.dtype == torch.int32
        assert torch.equal(layer.dequantize(torch.float32), dense[name])
    assert model.bfloat16().model.layers[0].self_attn.q_proj.columns.dtype == torch.int32
    elements = sum(p.numel() for p in AutoModelForCausalLM.from_config(model.config).parameters())
    assert model.num_parameters() == elements
    with torch.no_grad():
        logits = model(**batch()).logits
        plain = mg.from_pretrained(folder).dequantize()
        assert not packed_layers(plain)
        near = plain(**batch()).logits
    assert (logits - near).float().norm() < 0.02 * near.float().norm()
    # transformers' own call, with monograph imported.
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for name, layer in packed_layers(theirs).items():
        assert torch.equal(layer.columns, layers[name].columns)


def test_a_saved_model_is_the_folder_again(base, tmp_path):
    folder, _ = base
    mg.from_pretrained(folder, dtype=torch.float16).save_pretrained(tmp_path)
    before, after = tensors(folder), tensors(tmp_path)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "monograph"
    run("verify", tmp_path)
    again = packed_layers(mg.from_pretrained(tmp_path))
    assert again.keys() == packed_layers(mg.from_pretrained(folder)).keys()


def test_it_is_trained_and_the_base_keeps_its_bytes(base):
    folder, dense = base
    torch.manual_seed(0)
    model = mg.add_lora(mg.from_pretrained(folder), LoraConfig(r=4, target_modules="all-linear"))
    layers = packed_layers(model)
    assert len(layers) == len(dense)
    kept = {name: [t.clone() for t in layer.parameters()] for name, layer in layers.items()}
    step = TrainStep(model)
    losses = [step([batch()], 5e-3).loss.item() for _ in range(8)]
    assert losses[-1] < 0.99 * losses[0], losses
    for name, layer in layers.items():
        assert all(torch.equal(now, then) for now, then in zip(layer.parameters(), kept[name], strict=True))


def test_one_step_is_that_of_the_dequantised_base(base):
    """Sums in another order: gradients agree to what bf16 keeps."""
    folder, _ = base
    grads = []
    for dense in (False, True):
        model = mg.from_pretrained(folder, dtype=torch.float32)
        model = model.dequantize() if dense else model
        torch.manual_seed(0)
        model = mg.add_lora(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        model(**batch()).loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        assert (grad - grads[1][name]).norm() <= 1e-4 * grads[1][name].norm(), name


def test_merge_and_unload_has_the_order_of_the_model(base):
    folder, dense = base
    torch.manual_seed(0)
    model = mg.from_pretrained(folder, dtype=torch.float32)
    model = mg.add_lora(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    want = {}
    for name in dense:
        layer = model.base_model.model.get_submodule(name)
        a, b = (part["default"].weight.detach().double() for part in (layer.lora_A, layer.lora_B))
        want[name] = (dense[name].double() + (b @ a) * layer.scaling["default"]).float()
    merged = model.merge_and_unload()
    assert all(torch.equal(merged.get_submodule(name).weight, weight) for name, weight in want.items())


@pytest.mark.parametrize(
    ("method", "drop", "message"),
    [
        ("monograph", True, "wanted weight_columns beside each packed weight"),
        ("compressed-tensors", False, "there is a weight_columns, and quant_method is 'compressed-tensors'"),
    ],
)
def test_columns_and_the_method_of_the_folder_go_together(base, tmp_path, method, drop, message, caplog):
    folder, _ = base
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quant_method"] = method
    (tmp_path / "config.json").write_text(json.dumps(config))
    state = load_file(folder / "model.safetensors")
    if drop:
        del state["model.layers.1.self_attn.q_proj.weight_columns"]
    save_file(state, tmp_path / "model.safetensors")
    logging.enable_propagation()
    try:
        with pytest.raises(RuntimeError):  # transformers' own; its report has ours
            mg.from_pretrained(tmp_path)
    finally:
        logging.disable_propagation()
    assert message in caplog.text
