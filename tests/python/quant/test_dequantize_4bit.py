"""mg.dequantize_4bit on bitsandbytes' own QuantState: one graph, its values, its cost; FP8 and no state."""

import statistics
import time

import bitsandbytes as bnb
import pytest
import torch
import torch._dynamo
from bitsandbytes.functional import QuantState, quantize_4bit

import monograph as mg
from monograph.quant.quant_methods.bitsandbytes import from_quant_state
from support import bnb_reference

ROWS, COLS = 48, 128


def made(quant_type, nested, dtype, rows=ROWS, cols=COLS):
    weight = torch.randn(rows, cols).to(dtype)
    return quantize_4bit(weight, blocksize=64, quant_type=quant_type, compress_statistics=nested)


def wanted(packed, state):
    """bitsandbytes' PyTorch reference, in the state's dtype."""
    absmax = state.absmax
    if state.nested:
        absmax = bnb.functional.dequantize_blockwise(absmax, state.state2) + state.offset
    return bnb_reference.reference(packed, absmax, 64, state.quant_type, state.shape, state.dtype)


def compiled(function=mg.dequantize_4bit, backend="aot_eager"):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(function, fullgraph=True, backend=backend)


def no_json(*_, **__):
    raise AssertionError("as_dict was called: it writes JSON and reads the offset on the host")


@pytest.mark.parametrize("dtype", bnb_reference.DTYPES, ids=str)
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_one_graph_for_all_weights_of_a_shape(monkeypatch, quant_type, nested, dtype):
    weights = [made(quant_type, nested, dtype) for _ in range(3)]
    wants = [wanted(*weight) for weight in weights]  # bitsandbytes compiles a part of its own
    monkeypatch.setattr(QuantState, "as_dict", no_json)
    dequantize = compiled()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for weight, want in zip(weights, wants, strict=True):
            assert torch.equal(dequantize(*weight), want)
            assert torch.equal(mg.dequantize_4bit(*weight), want)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_a_transposed_tensor_in_the_graph(nested):
    packed, state = made("nf4", nested, torch.bfloat16)
    got = compiled()(packed.t(), state)
    assert got.shape == (COLS, ROWS)
    assert torch.equal(got, wanted(packed, state).t())


def test_layers_of_bitsandbytes_in_one_inductor_graph():
    """Params4bit themselves, as `dequantize_4bit(layer.weight, layer.weight.quant_state)` is written."""
    layers = torch.nn.ModuleList(bnb.nn.Linear4bit(64, 64, bias=False, quant_type="nf4") for _ in range(3))
    layers.to("cpu")

    def forward(x):
        for layer in layers:
            x = x @ mg.dequantize_4bit(layer.weight, layer.weight.quant_state).t()
        return x

    x = torch.randn(4, 64)
    want = x
    for layer in layers:
        want = want @ wanted(layer.weight.data, layer.weight.quant_state).t()
    step = compiled(forward, "inductor")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            got = step(x)
    torch.testing.assert_close(got, want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_another_table_is_refused_in_eager_mode_and_in_the_graph():
    packed, state = made("nf4", True, torch.bfloat16)
    dequantize = compiled()
    assert torch.equal(dequantize(packed, state), wanted(packed, state))
    state.code = state.code.clone()
    state.code[3] += 0.01
    with pytest.raises(ValueError, match=r"quant_state.code is not the table of nf4"):
        mg.dequantize_4bit(packed, state)
    with pytest.raises(RuntimeError, match=r"quant_state.code is not the table of nf4"):
        dequantize(packed, state)


def test_what_a_state_must_be_is_named():
    packed, state = made("nf4", True, torch.bfloat16)
    state.state2.blocksize = 128
    with pytest.raises(ValueError, match=r"quant_state.state2.blocksize is 128, wanted 256"):
        mg.dequantize_4bit(packed, state)
    packed, state = made("nf4", False, torch.bfloat16)
    state.absmax = state.absmax.bfloat16()
    with pytest.raises(ValueError, match=r"absmax.dtype is torch.bfloat16, wanted torch.float32"):
        mg.dequantize_4bit(packed, state)
    with pytest.raises(ValueError, match=r"tensor of scales is torch.uint8, wanted torch.float8_e4m3fn"):
        mg.dequantize_4bit(packed, torch.ones(3))


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_fp8_weight_with_its_block_scales(scale_dtype):
    """Tails of 192 and 320 in blocks of 128 by 128; the product of float64 rounded once."""
    weight = torch.randn(192, 320).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3).to(scale_dtype)
    grid = scale.double().repeat_interleave(128, 0)[:192].repeat_interleave(128, 1)[:, :320]
    want = (weight.double() * grid).bfloat16()
    assert torch.equal(mg.dequantize_4bit(weight, scale), want)
    assert torch.equal(compiled()(weight, scale), want)


def test_without_a_state_the_tensor_is_returned():
    tensor = torch.randn(3, 4)
    assert mg.dequantize_4bit(tensor) is tensor
    assert torch.equal(compiled()(tensor), tensor)


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_reading_the_state_costs_under_two_percent_of_a_large_weight(nested, record_property):
    """What Python adds, on a weight of one block, against the operator at 4096 x 4096."""

    def seconds(work, times):
        rounds = []
        for _ in range(times):
            began = time.perf_counter()
            work()
            rounds.append(time.perf_counter() - began)
        return statistics.median(rounds)

    operator = torch.ops.monograph.dequantize

    def both(rows, cols):
        packed, state = made("nf4", nested, torch.bfloat16, rows, cols)
        w = from_quant_state(packed, state)
        arguments = (w.values.reshape(-1), list(w.scales), [1, 64, rows, cols], torch.bfloat16)
        return (lambda: operator(*arguments)), (lambda: mg.dequantize_4bit(packed, state))

    with torch.inference_mode():
        direct, ours = both(1, 64)
        overhead = seconds(ours, 500) - seconds(direct, 500)
        large = seconds(both(4096, 4096)[0], 5)
    record_property("overhead_us", overhead * 1e6)
    record_property("share", overhead / large)
    assert overhead < 0.02 * large, f"{overhead * 1e6:.1f} us against {large * 1e3:.2f} ms"
