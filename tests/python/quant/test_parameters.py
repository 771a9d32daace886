"""Packed tensors as module parameters survive what people do to models."""

import pytest
import torch
from peft import prepare_model_for_kbit_training
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import monograph as mg


class Packed(nn.Module):
    """The plainest holder: every stored tensor is a frozen uint8 parameter."""

    is_loaded_in_4bit = True  # what PEFT looks at

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = mg.quantize(torch.randn(64, 128), double_quant=True)
        for i, tensor in enumerate((self.weight.values, *self.weight.scales)):
            setattr(self, f"packed_{i}", nn.Parameter(tensor, requires_grad=False))
        self.norm = nn.LayerNorm(128)

    def bytes(self):
        return [p.detach().clone() for name, p in self.named_parameters() if name.startswith("packed")]


CASTS = {
    "bfloat16": lambda m: m.to(torch.bfloat16),
    "half": lambda m: m.half(),
    "float": lambda m: m.float(),
    "double": lambda m: m.double(),
    "kbit": lambda m: prepare_model_for_kbit_training(m, use_gradient_checkpointing=False),
}


@pytest.mark.parametrize("cast", CASTS)
def test_casting_a_model_leaves_every_stored_byte(cast):
    model = Packed()
    before = model.bytes()
    model = CASTS[cast](model)
    after = model.bytes()
    assert len(after) == 5
    assert all(a.dtype == torch.uint8 and torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_memory_mapped_tensors_at_any_offset_work_as_they_are(tmp_path):
    w = mg.quantize(torch.randn(64, 96), double_quant=True)
    names = ["values", "absmax", "groups", "map", "offset"]
    # Two odd tensors in front push the data off every alignment.
    tensors = dict(zip(names, (w.values, *w.scales), strict=True)) | {"a": torch.zeros(3, dtype=torch.uint8)}
    save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / "w.safetensors")
    with safe_open(tmp_path / "w.safetensors", "pt") as f:
        values, *scales = (f.get_tensor(name) for name in names)
    got = torch.ops.monograph.dequantize(values, scales, w.layout, torch.float32)
    assert torch.equal(got, w.dequantize())
    for shift in (1, 2, 3):
        moved = []
        for t in (w.values, *w.scales):
            buffer = torch.zeros(t.numel() + shift, dtype=torch.uint8)
            buffer[shift:] = t.reshape(-1)
            moved.append(buffer[shift:])
        got = torch.ops.monograph.dequantize(moved[0], moved[1:], w.layout, torch.float32)
        assert torch.equal(got, w.dequantize())


def test_a_parameter_that_requires_grad_can_be_quantised():
    weight = nn.Parameter(torch.randn(32, 64))
    assert not mg.quantize(weight).values.requires_grad


def test_repr_tells_bits_per_weight():
    assert "nf4, shape=(64, 128), block_size=64, double_quant" in repr(Packed().weight)
    assert "4.50 bits per weight" in repr(mg.quantize(torch.randn(64, 64)))
