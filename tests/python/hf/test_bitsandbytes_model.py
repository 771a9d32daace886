"""A bitsandbytes model that is in memory already: its layers are taken as they are, without a copy."""

import copy

import bitsandbytes as bnb
import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import monograph as mg
from monograph.hf.peft.lora_linear import LoraLinear
from monograph.nn import QuantLinear, replace_linears
from support.tiny_models import bnb_config, load, save_llama

TOKENS = torch.arange(24).reshape(2, 12) * 13 % 320
STORAGES = (torch.uint8, torch.bfloat16, torch.float32)


def linear4bit(storage=torch.uint8, nested=True, bias=True, quant_type="nf4"):
    torch.manual_seed(2)
    layer = bnb.nn.Linear4bit(
        64,
        96,
        bias=bias,
        quant_type=quant_type,
        compute_dtype=torch.bfloat16,
        quant_storage=storage,
        compress_statistics=nested,
    )
    return layer.to("cpu").train()  # in training mode it keeps its bytes on any CPU


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_replace_linears_takes_the_bytes_as_they_are(storage, nested, quant_type):
    layer = linear4bit(storage, nested, quant_type=quant_type)
    weight, state = layer.weight, layer.weight.quant_state
    want = mg.dequantize_4bit(weight.data, state)
    model = replace_linears(nn.Sequential(layer))
    made = model[0]
    assert type(made) is QuantLinear
    assert type(made.values) is nn.Parameter
    assert made.values.data_ptr() == weight.data.data_ptr()  # no copy
    assert made.absmax.data_ptr() == state.absmax.data_ptr()
    assert (made.format.name, made.double_quant, made.training) == (quant_type, nested, True)
    assert torch.equal(made.dequantize(), want)
    assert made.bias.data_ptr() == layer.bias.data_ptr()
    x = torch.randn(3, 64).bfloat16()
    torch.testing.assert_close(made(x), layer(x), rtol=2e-2, atol=2e-2)


def test_replace_linears_refuses_another_format_than_the_layer_has():
    for asked, words in (
        ({"format": "fp4"}, "format is 'fp4' and 0 was quantised by bitsandbytes with 'nf4'"),
        ({"block_size": 128}, "block_size is 128 and 0 .* with 64"),
        ({"double_quant": False}, "double_quant is False and 0 .* with True"),
    ):
        model = nn.Sequential(linear4bit())
        with pytest.raises(ValueError, match=words):
            replace_linears(model, **asked)
        assert type(model[0]) is bnb.nn.Linear4bit
    replace_linears(nn.Sequential(linear4bit()), "nf4", block_size=64, double_quant=True)


def test_replace_linears_mixed_with_dense_and_shared_layers():
    shared = linear4bit()
    model = nn.ModuleDict(
        {"a": shared, "b": nn.ModuleList([shared, nn.Linear(64, 64)]), "lm_head": linear4bit()}
    )
    replace_linears(model, double_quant=True)
    assert model["a"] is model["b"][0]
    assert type(model["a"]) is type(model["b"][1]) is QuantLinear
    assert type(model["lm_head"]) is bnb.nn.Linear4bit  # of `skip`


def test_replace_linears_refuses_adapters():
    model = get_peft_model(nn.Sequential(nn.Linear(64, 64)), LoraConfig(r=2, target_modules=["0"]))
    with pytest.raises(ValueError, match="has adapters of PEFT"):
        replace_linears(model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"))


def in_memory(folder, **changes):
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=bnb_config(**changes), device_map="cpu", dtype=torch.bfloat16
    ).train()


def adapted(model, **options):
    torch.manual_seed(5)
    config = LoraConfig(
        r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False, **options
    )
    return get_peft_model(model, config)


@pytest.mark.parametrize(
    "options", [{}, {"use_dora": True}, {"lora_bias": True}], ids=["lora", "dora", "bias"]
)
def test_optimize_fuses_every_layer(folder, options):
    """Against mg.from_pretrained of what bitsandbytes saves: the same bits."""
    model = in_memory(folder)
    saved = folder.parent / "bnb"
    model.save_pretrained(saved)
    addresses = {n: p.data_ptr() for n, p in model.named_parameters() if type(p) is bnb.nn.Params4bit}
    assert len(addresses) == 14
    ours = mg.optimize(adapted(model, **options))
    layers = [m for m in ours.modules() if isinstance(m, LoraLinear)]
    assert len(layers) == 14
    assert all(layer.fused and isinstance(layer.base_layer, QuantLinear) for layer in layers)
    assert not any(isinstance(m, bnb.nn.Linear4bit) for m in ours.modules())
    base = ours.get_base_model()
    for name, address in addresses.items():
        path = name.removesuffix(".weight")
        assert base.get_submodule(path).base_layer.values.data_ptr() == address
    want = mg.optimize(adapted(mg.from_pretrained(saved, device_map="cpu"), **options)).train()
    results = [m(input_ids=TOKENS, labels=TOKENS) for m in (ours, want)]
    assert torch.equal(results[0].logits, results[1].logits)
    for result in results:
        result.loss.backward()
    theirs = dict(want.named_parameters())
    trained = {name: p for name, p in ours.named_parameters() if p.requires_grad}
    assert len(trained) >= 28
    for name, parameter in trained.items():
        assert torch.equal(parameter.grad, theirs[name].grad), name


def test_layers_without_an_adapter_and_saving(folder, tmp_path):
    """The folder that is saved afterwards is bitsandbytes' own, byte for byte."""
    model = in_memory(folder)
    model.save_pretrained(tmp_path / "before")
    replace_linears(model)
    assert sum(isinstance(m, QuantLinear) for m in model.modules()) == 14
    model.save_pretrained(tmp_path / "after")
    files = [tmp_path / name / "model.safetensors" for name in ("before", "after")]
    tensors = [load_file(file) for file in files]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
    again = load(tmp_path / "after")  # by transformers and bitsandbytes
    assert sum(isinstance(m, bnb.nn.Linear4bit) for m in again.modules()) == 14


def test_merging_and_unloading_gives_a_dense_model(folder, tmp_path):
    model = mg.optimize(adapted(in_memory(folder)))
    want = copy.deepcopy(model).eval()(input_ids=TOKENS).logits
    merged = model.merge_and_unload().eval()
    assert all(
        type(m) is nn.Linear for m in merged.modules() if isinstance(m, nn.Linear) and m is not merged.lm_head
    )
    torch.testing.assert_close(merged(input_ids=TOKENS).logits, want, rtol=0.1, atol=0.05)
    merged.save_pretrained(tmp_path / "merged")
    assert "quantization_config" not in (tmp_path / "merged" / "config.json").read_text()


def test_adapters_of_other_kinds_and_merged_layers_keep_bitsandbytes_layers(folder):
    ia3 = IA3Config(target_modules=["down_proj"], feedforward_modules=["down_proj"])
    model = get_peft_model(in_memory(folder), ia3)
    with pytest.warns(UserWarning, match="fused no layer"):
        mg.optimize(model)
    kept = [name for name, m in model.named_modules() if isinstance(m, bnb.nn.Linear4bit)]
    assert [name.split(".")[-2:] for name in kept] == [["down_proj", "base_layer"]] * 2
    merged = adapted(in_memory(folder))
    merged.merge_adapter()
    with pytest.warns(UserWarning, match="fused none of 14 LoRA layers"):
        mg.optimize(merged)
    assert sum(isinstance(m, bnb.nn.Linear4bit) for m in merged.modules()) == 14
