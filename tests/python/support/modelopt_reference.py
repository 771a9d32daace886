"""NVIDIA ModelOpt against ours, in a process of its own: importing it changes transformers."""

from __future__ import annotations

import torch
from modelopt.torch.quantization.qtensor import MXFP4QTensor, NVFP4QTensor
from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor

import monograph as mg
from support.hard_values import assert_same, hard_values


def nvfp4() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight = hard_values(640, 2048, spread=3).to(dtype)
        reference, scale, tensor = NVFP4QTensor.quantize(weight, 16)
        w = mg.quantize(weight, "nvfp4", rule="modelopt")
        assert_same(w, reference._quantized_data, scale, tensor.reshape(1))
        options = {"scale": scale, "double_scale": tensor, "block_sizes": {-1: 16}}
        back = reference.dequantize(torch.float32, **options)
        assert torch.equal(w.dequantize(torch.float32), back)


def mxfp8() -> None:
    weight = hard_values(640, 2048)
    reference, scale = MXFP8QTensor.quantize(weight)
    w = mg.quantize(weight, "mxfp8", rule="modelopt")
    assert_same(w, reference._quantized_data, scale)
    assert torch.equal(w.dequantize(), reference.dequantize(torch.float32, scale=scale))


def mxfp4_is_wrong() -> None:
    """Recorded: a zero becomes -0 (code 8), and ties go down instead of to the even code."""
    weight = torch.zeros(1, 32)
    weight[0, 0], weight[0, 1] = 4.0, 3.5
    reference, scale = MXFP4QTensor.quantize(weight, 32)
    w = mg.quantize(weight, "mxfp4", rule="rceil")
    assert scale.item() == w.scales[0].item() == 127
    assert w.values[0].tolist() == [0x66] + [0x00] * 15
    assert reference._quantized_data[0].tolist() == [0x56] + [0x88] * 15
    # Apart from that the bytes are the same: with the last bit of a mantissa set there is no tie.
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(640, 2048, generator=generator).view(torch.int32) | 1).view(torch.float32)
    reference, scale = MXFP4QTensor.quantize(weight, 32)
    assert_same(mg.quantize(weight, "mxfp4", rule="rceil"), reference._quantized_data, scale)


if __name__ == "__main__":
    nvfp4()
    mxfp8()
    mxfp4_is_wrong()
    print("modelopt agrees")
