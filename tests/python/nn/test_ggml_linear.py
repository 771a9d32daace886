"""QuantLinear on ggml's blocks: LoRA on top, state dicts, what is refused."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import monograph as mg
from monograph.nn import QuantLinear
from monograph.ops.formats import GGML_FORMATS
from monograph.quant.ggml_weight import ggml_weight, rotary_row_map
from support.ggml_weights import random_weight, shuffled

NAMES = tuple(GGML_FORMATS)


def layer_of(name, mapped=True, seed=0, rows=64):
    packed, dense = random_weight(name, rows, 256, seed, shuffled(rows) if mapped else None)
    return QuantLinear(replace(packed, dtype=torch.float32), torch.randn(rows)), dense


@pytest.mark.parametrize("name", NAMES)
def test_forward_is_the_dequantised_layer(name):
    layer, dense = layer_of(name)
    x = torch.randn(5, 256)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, dense, layer.bias), rtol=1e-5, atol=1e-4)
    assert torch.equal(layer.dequantize(torch.float32), dense)
    assert torch.equal(layer.weight + 0, dense)
    assert f"format={name}" in repr(layer)


def test_the_bytes_are_those_of_the_file(tmp_path):
    """A mapped file: the layer's parameter is a view of it."""
    packed, dense = random_weight("q4_k", 64, 256)
    path = tmp_path / "blocks"
    path.write_bytes(b"ab" + packed.values.numpy().tobytes())
    mapped = torch.from_file(str(path), size=2 + packed.values.numel(), dtype=torch.uint8)
    layer = QuantLinear(ggml_weight(mapped[2:], "Q4_K", 256))
    assert layer.values.data_ptr() == mapped.data_ptr() + 2
    assert torch.equal(layer.dequantize(torch.float32), dense)


@pytest.mark.parametrize("mapped", [False, True])
def test_state_dict_round_trip(mapped):
    layer, dense = layer_of("q6_k", mapped)
    other, _ = layer_of("q6_k", mapped, seed=1)
    assert set(layer.state_dict()) == {"values", "bias", *(["row_map"] if mapped else [])}
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.dequantize(torch.float32), dense)
    cast = layer.to(torch.float16)
    assert all(t.dtype == torch.uint8 for name, t in cast.state_dict().items() if name != "bias")
    assert torch.equal(cast.dequantize(torch.float32), dense)


@pytest.mark.parametrize("name", NAMES)
def test_lora_has_the_gradients_of_the_dequantised_base(name):
    """PEFT's LoRA on the packed layer and on an ordinary one with the decoded weight."""
    layer, dense = layer_of(name)
    plain = nn.Linear(256, 64)
    plain.weight.data, plain.bias.data = dense.clone(), layer.bias.data.clone()
    found = []
    for base in (layer, plain):
        torch.manual_seed(0)
        model = get_peft_model(nn.Sequential(base), LoraConfig(r=4, target_modules=["0"]))
        adapter = model.base_model.model[0]
        nn.init.normal_(adapter.lora_B["default"].weight)
        x = torch.randn(7, 256, requires_grad=True)
        y = model(x)
        y.square().sum().backward()
        found.append(
            (y.detach(), x.grad, *(f["default"].weight.grad for f in (adapter.lora_A, adapter.lora_B)))
        )
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


def test_a_merge_gives_a_dense_layer():
    layer, dense = layer_of("q4_k")
    model = get_peft_model(nn.Sequential(layer), LoraConfig(r=4, target_modules=["0"]))
    adapter = model.base_model.model[0]
    nn.init.normal_(adapter.lora_B["default"].weight)
    delta = adapter.get_delta_weight("default").detach()
    merged = model.merge_and_unload()[0]
    assert type(merged) is nn.Linear
    torch.testing.assert_close(merged.weight.detach(), dense + delta)


def test_quantising_again_is_refused_by_name():
    with pytest.raises(ValueError, match="format q4_k is read and trained on, nothing quantises to it"):
        layer_of("q4_k")[0].requantize(torch.randn(64, 256))
    with pytest.raises(ValueError, match="format q4_0 is read and trained on, nothing quantises to it"):
        mg.MonographConfig("q4_0")


def test_what_is_not_a_tensor_of_a_gguf_is_refused_by_name():
    values = torch.zeros(2 * 144, dtype=torch.uint8)
    for arguments, message in (
        ((values, "Q2_K", 256), "format is 'Q2_K', known are q8_0, q4_0"),
        ((values, "Q4_K", 320), "rows have 320 elements, format q4_k wants a multiple of 256"),
        ((values[1:], "Q4_K", 256), "values has 287 bytes, wanted rows of 144"),
        ((values.short(), "Q4_K", 256), "values has dtype torch.int16, wanted torch.uint8"),
    ):
        with pytest.raises(ValueError, match=message):
            ggml_weight(*arguments)
    with pytest.raises(
        ValueError, match=r"row_map has dtype torch.int64 and 1 dimensions, wanted torch.int32"
    ):
        ggml_weight(values, "Q4_K", 256, row_map=torch.arange(2))
    with pytest.raises(ValueError, match="rotary_row_map: 12 rows of 4 heads"):
        rotary_row_map(12, 4)
