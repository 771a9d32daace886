"""from_pretrained: what is in memory is what the file holds, or what quantising the source gives."""

import pathlib

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

import monograph as mg
from monograph.nn import QuantLinear
from support.tiny_models import tiny_llama

SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 256}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A bf16 Llama in three shards, with biases and an output head of its own."""
    model = tiny_llama(dtype=torch.bfloat16, **SIZES, attention_bias=True)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    folder = tmp_path_factory.mktemp("source")
    model.save_pretrained(folder, max_shard_size="150KB")
    assert len(list(folder.glob("*.safetensors"))) >= 3
    return folder


@pytest.fixture(scope="module")
def bitsandbytes_folder(source, tmp_path_factory):
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=["lm_head", "down_proj"],
    )
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, dtype=torch.bfloat16)
    folder = tmp_path_factory.mktemp("bitsandbytes")
    model.save_pretrained(folder)
    return folder


def tensors(folder):
    found = {}
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def quantised(model):
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("format", ["nf4", "fp4"])
def test_quantised_while_loading_is_the_sources_quantisation(source, format, double):
    """Dequantised values, so that a base that loaded as zeros cannot pass."""
    config = mg.MonographConfig(format, double_quant=double)
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, dtype=torch.bfloat16)
    stored = tensors(source)
    layers = quantised(model)
    assert len(layers) == 14
    for name, layer in layers.items():
        weight = stored[f"{name}.weight"]
        assert torch.equal(layer.dequantize(), mg.quantize(weight, format, double_quant=double).dequantize())
        assert (layer.dequantize() - weight).norm() < 0.2 * weight.norm()
        if f"{name}.bias" in stored:
            assert torch.equal(layer.bias, stored[f"{name}.bias"])
    assert torch.equal(model.lm_head.weight, stored["lm_head.weight"])
    assert not any(p.requires_grad for layer in layers.values() for p in layer.parameters())


def test_a_quantised_folder_is_taken_as_it_is(bitsandbytes_folder):
    """Every packed byte is the file's, lies in its mapping, and skipped modules stay dense."""
    model = mg.from_pretrained(bitsandbytes_folder)
    stored = tensors(bitsandbytes_folder)
    layers = quantised(model)
    assert len(layers) == 12
    assert type(model.model.layers[0].mlp.down_proj) is torch.nn.Linear
    mapped = []
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(".safetensors"):
            mapped.append([int(end, 16) for end in line.split()[0].split("-")])
    for name, layer in layers.items():
        assert torch.equal(layer.values.reshape(-1), stored[f"{name}.weight"].reshape(-1))
        assert torch.equal(layer.absmax.reshape(-1), stored[f"{name}.weight.absmax"])
        for tensor in (layer.values, layer.absmax):
            assert any(begin <= tensor.data_ptr() < end for begin, end in mapped), name


def test_saved_again_it_loads_in_bitsandbytes(bitsandbytes_folder, tmp_path):
    model = mg.from_pretrained(bitsandbytes_folder)
    model.save_pretrained(tmp_path)
    before, after = tensors(bitsandbytes_folder), tensors(tmp_path)
    assert before.keys() == after.keys()
    for name in before:
        if not name.endswith("quant_state.bitsandbytes__nf4"):
            assert torch.equal(before[name], after[name]), name
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).train()
    ids = torch.arange(24)[None]
    with torch.no_grad():
        want, got = reference(ids).logits, model(ids).logits
    assert (got - want).float().norm() <= 2**-6 * want.float().norm()


def test_merged_it_is_saved_as_a_dense_model(source, tmp_path):
    from peft import LoraConfig

    model = mg.from_pretrained(source, mg.MonographConfig("nf4"))
    wrapped = mg.add_lora(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))
    ids = torch.arange(24)[None]
    with torch.no_grad():
        want = wrapped(ids).logits
        merged = wrapped.merge_and_unload()
        merged.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert not hasattr(again.config, "quantization_config")
        assert (again(ids).logits - want).float().norm() <= 2**-4 * want.float().norm()


def test_misuse_is_named(source, bitsandbytes_folder):
    with pytest.raises(ValueError, match="already quantised by 'bitsandbytes'"):
        mg.from_pretrained(bitsandbytes_folder, mg.MonographConfig("nf4"))
    with pytest.raises(ValueError, match="distributed_config cuts weights while they load"):
        mg.from_pretrained(bitsandbytes_folder, distributed_config={"fsdp_size": 2})
    with pytest.raises(ValueError, match="unknown arguments"):
        mg.MonographConfig("nf4", blocksize=64)
    config = LlamaConfig.from_pretrained(source)
    config.intermediate_size = 256
    with pytest.raises(RuntimeError, match="conversion"):  # transformers collects the errors, and prints ours
        mg.from_pretrained(source, mg.MonographConfig("nf4"), config=config)
