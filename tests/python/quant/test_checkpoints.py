"""Checkpoints that transformers and bitsandbytes wrote: into PackedWeight and back, byte for byte."""

import json

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import monograph as mg
from support.tiny_models import tiny_llama


def save_llama(folder, hidden_size):
    sizes = {"hidden_size": hidden_size, "intermediate_size": 2 * hidden_size, "vocab_size": 128}
    tiny_llama(dtype=torch.bfloat16, **sizes).save_pretrained(folder)


def load_4bit(folder, **options):
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, **options)
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantization, dtype=torch.bfloat16
    )


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
# 96 is not a multiple of 64: blocks straddle rows. bitsandbytes cannot run such a layer without gradients on
# this kind of CPU (its repack asserts), so only the bytes are compared there.
@pytest.mark.parametrize("hidden_size", [128, 96])
def test_a_saved_model_reads_writes_back_and_loads(tmp_path, quant_type, double_quant, storage, hidden_size):
    save_llama(tmp_path / "dense", hidden_size)
    model = load_4bit(
        tmp_path / "dense",
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_quant_storage=storage,
    )
    model.save_pretrained(tmp_path / "saved")
    state = load_file(tmp_path / "saved" / "model.safetensors")
    names = [key.rsplit(".quant_state", 1)[0] for key in state if ".quant_state." in key]
    assert len(names) == 2 * 7
    rewritten = dict(state)
    for name in names:
        weight = mg.from_bitsandbytes(state, name)
        assert weight.double_quant == double_quant
        entries = mg.to_bitsandbytes(weight, name, quant_storage=storage)
        assert set(entries) == {key for key in state if key == name or key.startswith(name + ".")}
        for key, tensor in entries.items():
            assert tensor.dtype == state[key].dtype, key
            assert tensor.shape == state[key].shape, key
            assert torch.equal(tensor.view(torch.uint8), state[key].view(torch.uint8)), key
        rewritten.update(entries)
    if hidden_size % 64 == 0:
        same_logits(tmp_path, rewritten)


def same_logits(tmp_path, rewritten):
    """transformers loads the entries we wrote and computes what it computes from its own."""
    ours = tmp_path / "ours"
    ours.mkdir()
    for file in (tmp_path / "saved").glob("*.json"):
        (ours / file.name).write_bytes(file.read_bytes())
    save_file({k: v.contiguous() for k, v in rewritten.items()}, ours / "model.safetensors", {"format": "pt"})
    assert json.loads((ours / "config.json").read_text())["quantization_config"]["load_in_4bit"]
    tokens = torch.arange(24)[None]
    with torch.no_grad():
        want = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)(tokens).logits
        got = AutoModelForCausalLM.from_pretrained(ours, dtype=torch.bfloat16)(tokens).logits
    assert torch.equal(got, want)


def test_real_artefacts_of_the_quantiser_dequantise_to_its_values():
    """Params4bit made by bitsandbytes itself, not a synthetic fixture."""
    torch.manual_seed(1)
    for nested in (False, True):
        for quant_type in ("nf4", "fp4"):
            layer = Linear4bit(128, 64, bias=False, compress_statistics=nested, quant_type=quant_type)
            layer.weight = Params4bit(
                torch.randn(64, 128, dtype=torch.bfloat16),
                requires_grad=False,
                compress_statistics=nested,
                quant_type=quant_type,
            )
            layer = layer.to("cpu")
            from bitsandbytes.functional import dequantize_4bit

            want = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            assert torch.equal(mg.dequantize_4bit(layer.weight.data, layer.weight.quant_state), want)
            assert torch.equal(mg.from_bitsandbytes(layer.state_dict()).dequantize(), want)


def test_expert_parameters_in_three_dimensions():
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            # 96 columns: a block of 64 straddles rows and experts
            self.gate_up_proj = nn.Parameter(torch.randn(3, 32, 96, dtype=torch.bfloat16))

    for nested in (False, True):
        experts = Experts()
        replace_parameter_4bit(experts, "gate_up_proj", compress_statistics=nested, quant_type="nf4")
        want = experts.gate_up_proj.detach().clone()
        state = {key.removeprefix("parametrizations."): v for key, v in experts.state_dict().items()}
        name = next(key.rsplit(".quant_state", 1)[0] for key in state if ".quant_state." in key)
        if name not in state:
            state[name] = state[f"{name}.original"]
        weight = mg.from_bitsandbytes(state, name)
        assert weight.shape == (3, 32, 96)
        assert weight.values.shape == (3, 32, 48)
        entries = mg.to_bitsandbytes(weight, name)
        for key, tensor in entries.items():
            assert torch.equal(tensor.reshape(-1), state[key].reshape(-1)), key
        # bitsandbytes' native path is wrong where blocks straddle rows; its bytes are right
        dense = weight.dequantize()
        aligned = mg.quantize(torch.randn(3, 32, 128), "nf4")
        assert aligned.scales[0].shape == (3, 32, 8)
        assert dense.shape == want.shape


def test_lies_in_the_state_are_refused():
    weight = mg.quantize(torch.randn(64, 64), double_quant=True)
    good = mg.to_bitsandbytes(weight)
    assert torch.equal(mg.from_bitsandbytes(good).dequantize(), weight.dequantize())
    key = "weight.quant_state.bitsandbytes__nf4"

    def with_field(**changes):
        fields = json.loads(bytes(good[key].tolist())) | changes
        return good | {key: torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)}

    bad = {
        "block size is 48": with_field(blocksize=48),
        "quant_state says 'fp4'": with_field(quant_type="fp4"),
        "dtype is 'int8'": with_field(dtype="int8"),
        "has 2048 bytes, wanted 4096": with_field(shape=[128, 64], blocksize=128),
        "absmax has 64 bytes, wanted 128": with_field(shape=[128, 64]),
        "nested_blocksize is 128": with_field(nested_blocksize=128),
        "unknown fields": with_field(extra=1),
        "quant_map is not the table": good | {"weight.quant_map": torch.zeros(16)},
        "found 0 entries": {k: v for k, v in good.items() if k != key},
    }
    for message, state in bad.items():
        with pytest.raises(ValueError, match=message):
            mg.from_bitsandbytes(state)
