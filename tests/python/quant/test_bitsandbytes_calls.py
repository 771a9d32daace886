"""bitsandbytes' own calls on a QuantLinear's weight and state, and ours on bitsandbytes' objects."""

import bitsandbytes as bnb
import pytest
import torch
import torch._dynamo
from bitsandbytes.functional import QuantState, quantize_4bit
from torch import nn

import monograph as mg
from monograph.quant.quant_methods.bitsandbytes import from_quant_state

ROWS, COLS = 96, 64  # not square: a transposed weight is told by its shape


def layer_of(nested, dtype=torch.bfloat16, bias=False):
    torch.manual_seed(3)
    dense = nn.Linear(COLS, ROWS, bias=bias, dtype=dtype)
    return mg.nn.QuantLinear.from_linear(dense, "nf4", double_quant=nested)


def packed_by_bitsandbytes(nested, dtype=torch.bfloat16, quant_type="nf4"):
    torch.manual_seed(4)
    weight = torch.randn(ROWS, COLS).to(dtype)
    return quantize_4bit(weight, blocksize=64, quant_type=quant_type, compress_statistics=nested)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dequantize_4bit_of_a_transposed_weight(nested, dtype):
    layer = layer_of(nested, dtype)
    want, state = layer.dequantize(), layer.weight.quant_state
    for weight in (layer.weight, layer.weight.data):
        for turned in (weight.t(), weight.T, weight.mT, weight.transpose(-1, -2), weight.permute(1, 0)):
            assert type(turned) is type(layer.weight)  # still packed
            assert turned.shape == (COLS, ROWS)
            assert turned.stride() == want.t().stride()
            assert torch.equal(mg.dequantize_4bit(turned, state), want.t())
        assert torch.equal(mg.dequantize_4bit(weight.t().t(), state), want)
        assert torch.equal(weight.permute(0, 1), want)
    assert torch.equal(
        torch.ones(2, COLS, dtype=dtype) @ layer.weight.t(), torch.ones(2, COLS, dtype=dtype) @ want.t()
    )


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("grad", [False, True])
def test_their_matmul_on_our_weight(nested, dtype, rows, grad):
    layer = layer_of(nested, dtype)
    state, want = layer.weight.quant_state, layer.dequantize()
    x = torch.randn(rows, COLS, dtype=dtype, requires_grad=grad)
    for weight in (layer.weight.t(), layer.weight, layer.weight.data.t()):
        y = bnb.matmul_4bit(x, weight, quant_state=state)
        torch.testing.assert_close(y.float(), (x.float() @ want.float().t()), rtol=2e-2, atol=2e-2)
        if grad:
            (dx,) = torch.autograd.grad(y.sum(), [x])
            wanted = want.float().sum(0).expand_as(x)
            torch.testing.assert_close(dx.float(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("nested", [False, True])
def test_their_dequantize_on_our_weight(nested):
    layer = layer_of(nested, torch.float32)
    state, want = layer.weight.quant_state, layer.dequantize()
    for weight, wanted in ((layer.weight, want), (layer.weight.data, want), (layer.weight.t(), want.t())):
        torch.testing.assert_close(
            bnb.functional.dequantize_4bit(weight, state), wanted, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("nested", [False, True])
def test_the_state_has_what_theirs_has(nested):
    packed, theirs = packed_by_bitsandbytes(nested)
    weight = mg.nn.QuantLinear(from_quant_state(packed, theirs)).weight
    ours = weight.quant_state
    for is_packed in (False, True):
        found, wanted = ours.as_dict(packed=is_packed), theirs.as_dict(packed=is_packed)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            same = (
                torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
            )
            assert same, (is_packed, name)
    again = QuantState.from_dict(ours.as_dict(packed=True), device=torch.device("cpu"))
    assert again == theirs
    parameter = bnb.nn.Params4bit(packed, quant_state=theirs, quant_type="nf4", compress_statistics=nested)
    names = ["blocksize", "quant_type", "compress_statistics", "nested_offset"]
    for name in [*names, "nested_blocksize", "nested_dtype"] if nested else names:
        assert getattr(weight, name) == getattr(parameter, name), name
    assert hasattr(weight, "nested_dtype") == hasattr(parameter, "nested_dtype") == nested


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_dequantize_4bit_takes_their_arguments(nested, quant_type):
    packed, state = packed_by_bitsandbytes(nested, quant_type=quant_type)
    want = mg.dequantize_4bit(packed, state)
    assert torch.equal(mg.dequantize_4bit(packed, state, quant_type=quant_type), want)
    assert torch.equal(mg.dequantize_4bit(packed, quant_state=state, blocksize=64, absmax=state.absmax), want)
    out = torch.empty_like(want)
    assert mg.dequantize_4bit(packed, state, out=out) is out
    assert torch.equal(out, want)
    other = {"nf4": "fp4", "fp4": "nf4"}[quant_type]
    with pytest.raises(ValueError, match=f"quant_type, beside .*is {other}, wanted {quant_type}"):
        mg.dequantize_4bit(packed, state, quant_type=other)
    with pytest.raises(ValueError, match=r"blocksize, beside .*is 128, wanted 64"):
        mg.dequantize_4bit(packed, state, blocksize=128)
    with pytest.raises(ValueError, match=r"out.shape is \(64, 96\), wanted \(96, 64\)"):
        mg.dequantize_4bit(packed, state, out=out.t())
    if not nested:
        out.zero_()
        mg.dequantize_4bit(packed, None, state.absmax, out, 64, quant_type)
        assert torch.equal(out, want)
        with pytest.raises(ValueError, match="out is None without a quant_state"):
            mg.dequantize_4bit(packed, absmax=state.absmax)


def test_a_state_of_another_weight_is_refused():
    other = mg.nn.QuantLinear.from_linear(nn.Linear(COLS, 32), "nf4").weight.quant_state
    with pytest.raises(ValueError, match=r"quant_state.shape is .*32.*, wanted .*96"):
        mg.dequantize_4bit(layer_of(False).weight, other)


def test_bytes_that_were_reordered_for_inference_are_refused():
    """bitsandbytes' own conversion on a CPU with AVX512-BF16 rounds the scales: nothing is as it was."""
    layer = bnb.nn.Linear4bit(COLS, ROWS, bias=False, quant_type="nf4").to("cpu")
    packed, state = bnb.functional._convert_weight_packed_for_cpu(layer.weight.data, layer.weight.quant_state)
    layer.weight.data = packed
    for call in (
        lambda: mg.dequantize_4bit(packed, state),
        lambda: from_quant_state(packed, state),
        lambda: mg.nn.replace_linears(nn.Sequential(layer)),
    ):
        with pytest.raises(ValueError, match=r"packing_format_for_cpu is True.*load the model again"):
            call()


def test_in_one_graph():
    layer, x = layer_of(True), torch.randn(3, COLS).bfloat16()
    state = layer.weight.quant_state
    calls = {
        "ours": lambda x: x @ mg.dequantize_4bit(layer.weight.t(), layer.weight.quant_state),
        "their_values": lambda x: (
            x @ bnb.functional.dequantize_4bit(layer.weight.t(), layer.weight.quant_state)
        ),
        "theirs": lambda x: bnb.matmul_4bit(x, layer.weight.t(), quant_state=layer.weight.quant_state),
        "quant_type": lambda x: x @ mg.dequantize_4bit(layer.values, state, quant_type="nf4").t(),
    }
    for name, call in calls.items():
        torch._dynamo.reset()
        got = torch.compile(call, fullgraph=True, backend="aot_eager")(x)
        assert torch.equal(got, call(x)), name
