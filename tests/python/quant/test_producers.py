"""Bytes equal to those of the tools that write these formats, rule by rule; where a tool is wrong, shown.

Each comparison covers more than ten million values over the rules of this file: random ones of many
magnitudes, ties, signed zeros and whole blocks of zeros.
"""

import importlib.util
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import monograph as mg
from support.hard_values import assert_same, hard_values

MODELOPT = pathlib.Path(__file__).parents[1] / "support" / "modelopt_reference.py"


class TestTorchao:
    @pytest.fixture(scope="class")
    def mx(self):
        return pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")

    def element(self, name):
        return torch.float4_e2m1fn_x2 if name == "mxfp4" else torch.float8_e4m3fn

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil"])
    @pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
    def test_mx(self, mx, name, rule, dtype):
        weight = hard_values(640, 2048).to(dtype)
        mode = mx.ScaleCalculationMode(rule)
        scale, data = mx.to_mx(weight, self.element(name), 32, mode)
        same = mg.quantize(weight, name, rule=rule)
        if rule == "rceil":  # a block of zeros: torchao does not scale it, and keeps the signs of zeros
            assert torch.equal(same.values.reshape(-1), data.view(torch.uint8).reshape(-1))
        assert_same(same, data, scale)
        if rule == "floor":
            assert_same(mg.quantize(weight, name, rule="torchao"), data, scale)

    @pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
    def test_mx_decodes_every_byte(self, mx, name):
        """All scale bytes under all codes but scale 0, where torchao takes 2^-126 for 2^-127."""
        codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
        scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8 if name == "mxfp8" else 16)
        shape = (256, 256 if name == "mxfp8" else 512)
        layout = [{"mxfp4": 3, "mxfp8": 4}[name], 32, *shape]
        got = torch.ops.monograph.dequantize(codes, [scales], layout, torch.float32)
        data = codes if name == "mxfp4" else codes.view(torch.float8_e4m3fn)
        reference = mx.to_dtype(
            data, scales.view(torch.float8_e8m0fnu), self.element(name), 32, torch.float32
        )
        reference = reference.reshape(shape)
        same = (got == reference) | (got.isnan() & reference.isnan())
        assert bool(same[1:].all())
        assert bool((reference[0].abs() >= got[0].abs())[~got[0].isnan()].all())

    def test_where_torchao_is_wrong(self, mx):
        """Recorded so that a fixed release is noticed: byte 0, and powers of two found by log2."""
        tiny = torch.full((1, 32), 2.0**-127)
        scale, data = mx.to_mx(tiny, torch.float4_e2m1fn_x2, 32, mx.ScaleCalculationMode.FLOOR)
        assert scale.view(torch.uint8).item() == 0
        assert data[0, 0].item() == 0x11  # 0.5: it divided by 2^-126
        w = mg.quantize(tiny, "mxfp4", rule="floor")
        assert w.values[0, 0].item() == 0x22  # 1
        assert torch.equal(w.dequantize(), tiny)
        above = torch.tensor(6.0 * 2.0**90).nextafter(torch.tensor(torch.inf)).expand(1, 32).contiguous()
        scale, _ = mx.to_mx(above, torch.float4_e2m1fn_x2, 32, mx.ScaleCalculationMode.RCEIL)
        assert scale.view(torch.uint8).item() == 127 + 90  # the logarithm was rounded down
        assert mg.quantize(above, "mxfp4", rule="rceil").scales[0].item() == 127 + 91

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_nvfp4(self, mx, dtype):
        from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

        weight = hard_values(640, 2048, spread=3).to(dtype)
        tensor = per_tensor_amax_to_scale(weight.abs().max())
        reference = NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=tensor, is_swizzled_scales=False)
        w = mg.quantize(weight, "nvfp4", rule="torchao")
        assert_same(w, reference.qdata, reference.scale, tensor.reshape(1))
        assert torch.equal(w.dequantize(torch.float32), reference.dequantize(torch.float32))


class TestCompressedTensors:
    """Its observers compute in the type of the weight; the rules here are those of fp32."""

    def scheme(self, **options):
        quantization = pytest.importorskip("compressed_tensors.quantization")
        weights = quantization.QuantizationArgs(type="float", symmetric=True, **options)
        return quantization.QuantizationScheme(targets=["Linear"], weights=weights)

    def block_scales(self, weight, scheme, block, global_scale=None):
        from compressed_tensors.quantization.utils import calculate_qparams

        blocks = weight.reshape(weight.shape[0], -1, block)
        low, high = blocks.amin(-1), blocks.amax(-1)
        return calculate_qparams(low, high, scheme.weights, global_scale)[0]

    def test_mxfp4(self):
        from compressed_tensors.compressors import MXFP4PackedCompressor

        scheme = self.scheme(num_bits=4, strategy="group", group_size=32, scale_dtype=torch.uint8)
        weight = hard_values(640, 2048)
        scale = self.block_scales(weight, scheme, 32)
        state = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
        positive = mg.quantize(weight + 0.0, "mxfp4", rule="compressed-tensors")  # -0 loses its sign there
        assert_same(positive, state["weight_packed"], state["weight_scale"])
        back = MXFP4PackedCompressor.decompress(state, scheme)["weight"]
        assert torch.equal(positive.dequantize(torch.bfloat16), back)

    def test_mxfp8(self):
        from compressed_tensors.compressors import MXFP8QuantizationCompressor

        scheme = self.scheme(num_bits=8, strategy="group", group_size=32, scale_dtype=torch.uint8)
        weight = hard_values(640, 2048)
        scale = self.block_scales(weight, scheme, 32)
        state = MXFP8QuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
        assert_same(
            mg.quantize(weight, "mxfp8", rule="compressed-tensors"), state["weight"], state["weight_scale"]
        )
        # Its constant is that of E2M1: a block between 1.75 and 1.9375 gets twice the scale of `even`.
        odd = torch.full((1, 32), 1.8)
        ours = [mg.quantize(odd, "mxfp8", rule=r).scales[0].item() for r in ("even", "compressed-tensors")]
        assert ours[1] == ours[0] + 1

    def test_nvfp4(self):
        from compressed_tensors.compressors import NVFP4PackedCompressor
        from compressed_tensors.quantization.utils import generate_gparam

        scheme = self.scheme(
            num_bits=4, strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn
        )
        weight = hard_values(640, 2048, spread=3)
        global_scale = generate_gparam(weight.min(), weight.max())
        scale = self.block_scales(weight, scheme, 16, global_scale)
        state = {"weight": weight, "weight_scale": scale, "weight_global_scale": global_scale}
        state = NVFP4PackedCompressor.compress(state, scheme)
        w = mg.quantize(weight, "nvfp4-divide", rule="compressed-tensors")
        assert_same(w, state["weight_packed"], state["weight_scale"], global_scale)
        back = NVFP4PackedCompressor.decompress(state, scheme)["weight"]
        assert torch.equal(w.dequantize(torch.bfloat16), back)

    def test_fp8_blocks_of_any_shape(self):
        from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
        from compressed_tensors.quantization.utils import calculate_qparams

        scheme = self.scheme(num_bits=8, strategy="block", block_structure=[128, 128])
        for rows, cols in ((576, 4304), (192, 200)):
            weight = hard_values(rows, cols)
            padded = torch.nn.functional.pad(weight, (0, -cols % 128, 0, -rows % 128))
            blocks = padded.reshape(-(-rows // 128), 128, -(-cols // 128), 128)
            scale = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), scheme.weights)[0]
            codes = quantize(weight, scale, None, scheme.weights, dtype=torch.float8_e4m3fn)
            w = mg.quantize(weight, "fp8-block", rule="compressed-tensors")
            assert_same(w, codes, scale)
            back = dequantize(codes, scale, None, scheme.weights, dtype=torch.float32)
            assert torch.equal(w.dequantize(), back)


class TestTransformers:
    @pytest.mark.parametrize("kind", ["float32", "e8m0"])
    def test_fp8_blocks(self, kind):
        from transformers.integrations.finegrained_fp8 import Fp8Quantize

        weight = hard_values(640, 2048)
        scale_fmt = "ue8m0" if kind == "e8m0" else None
        config = SimpleNamespace(weight_block_size=(128, 128), scale_fmt=scale_fmt)
        op = Fp8Quantize(SimpleNamespace(quantization_config=config))
        reference = op.convert({"x.weight": weight})
        w = mg.quantize(weight, "fp8-block", rule="transformers", scale_type=kind)
        assert_same(w, reference["x.weight"], reference["x.weight_scale_inv"])

    def test_where_transformers_is_wrong(self):
        """It takes the block from the shapes: 192 rows with two scales become two blocks of 96."""
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize

        op = Fp8Dequantize(SimpleNamespace(quantization_config=None))
        weight = torch.randn(192, 128)
        weight[128:] *= 100
        w = mg.quantize(weight, "fp8-block")
        codes, scales = w.values.view(torch.float8_e4m3fn), w.scales[0].view(torch.float32)
        reference = op._dequantize_one(codes, scales, torch.float32)
        ours = w.dequantize()
        assert torch.equal(ours[:96], reference[:96])
        assert (ours[96:128] - reference[96:128]).abs().max() > 50 * ours[96:128].abs().max()
        assert (ours - weight).norm() < 0.05 * weight.norm()
        with pytest.raises(ValueError, match="not divisible by scale grid"):
            op._dequantize_one(torch.zeros(576, 128), torch.ones(5, 1), torch.float32)


def test_modelopt():
    """In a process of its own: importing it changes transformers."""
    if importlib.util.find_spec("modelopt") is None:
        pytest.skip("nvidia-modelopt is not installed")
    done = subprocess.run([sys.executable, str(MODELOPT)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "modelopt agrees" in done.stdout
