"""ggml's blocks: operators against the gguf package, row maps, graphs, gradients, refusals."""

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch

import monograph as mg
from monograph.nn import QuantLinear
from monograph.ops.dequantize import fused_dequantize, portable_dequantize
from monograph.ops.formats import GGML_FORMATS
from monograph.ops.linear_cross_entropy import linear_cross_entropy
from monograph.quant.ggml_weight import ggml_weight, rotary_row_map
from monograph.quant.packed_weight import PackedWeight
from support.ggml_weights import ggml_type, gguf_values, random_blocks, random_weight, shuffled

pytestmark = pytest.mark.per_isa
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NAMES = tuple(GGML_FORMATS)


def arguments(packed):
    return packed.values, list(packed.scales), packed.layout


def same_bits(got, want):
    """NaN where NaN is wanted; else the same bits, zeros' signs too."""
    bits = torch.int32 if want.dtype == torch.float32 else torch.int16
    equal = (got.view(bits) == want.view(bits)) | (got.isnan() & want.isnan())
    return got.dtype == want.dtype and got.shape == want.shape and bool(equal.all())


def test_the_table_is_that_of_the_gguf_package():
    for name, fmt in GGML_FORMATS.items():
        sizes = gguf.GGML_QUANT_SIZES[ggml_type(name)]
        assert (fmt.block_sizes[0], fmt.block_bytes) == sizes


@pytest.mark.parametrize("name", NAMES)
def test_a_million_random_elements_are_those_of_gguf(name):
    """Random bytes: every code, infinities and NaN among the scales. In every form of the operator."""
    blocks = random_blocks(name, 1024, 1024, 1, small=False)
    want = gguf_values(name, blocks)
    assert want.numel() >= 10**6
    if name == "ggml_mxfp4":  # 2^(e - 128) is a number for every e, with every code
        numbers = blocks.reshape(-1, 17).astype(int)
        assert len(np.unique(numbers[:, :1] * 16 + numbers[:, 1:] % 16)) == 256 * 16
        assert bool(want.isinf().any())
    else:
        assert bool(want.isnan().any())
    packed = ggml_weight(torch.from_numpy(blocks), name, 1024)
    for dtype in DTYPES:
        for decode in (torch.ops.monograph.dequantize, portable_dequantize, fused_dequantize):
            assert same_bits(decode(*arguments(packed), dtype), want.to(dtype))


@pytest.mark.parametrize("name", NAMES)
def test_linear_and_dx_are_those_of_the_decoded_weight_at_any_batch(name):
    """Bit by bit, with a row map and without: both go through the same products."""
    for cols, mapped in ((512, False), (768, True)):
        packed, elements = random_weight(name, 133, cols, 2, shuffled(133) if mapped else None)
        for dtype in (torch.bfloat16, torch.float32):
            dense, plain = elements.to(dtype), [0, 0, 133, cols]
            for batch in (1, 7, 40):
                torch.manual_seed(batch)
                x, dy = torch.randn(batch, cols, dtype=dtype), torch.randn(batch, 133, dtype=dtype)
                got = torch.ops.monograph.linear(x, *arguments(packed), None, None, None, None)
                want = torch.ops.monograph.linear(x, dense, [], plain, None, None, None, None)
                assert torch.equal(got, want)
                got = torch.ops.monograph.linear_dx(dy, *arguments(packed), None, None)
                assert torch.equal(got, torch.ops.monograph.linear_dx(dy, dense, [], plain, None, None))
                assert torch.allclose(want.float(), x.float() @ dense.float().t(), rtol=0.02, atol=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_linear_shared_is_the_single_calls(name):
    """Also beside a weight of another format."""
    pairs = [
        random_weight(n, 64, 256, i, m) for i, (n, m) in enumerate([(name, shuffled(64)), ("q4_0", None)])
    ]
    x = torch.randn(5, 256, dtype=torch.bfloat16)
    layouts = [number for packed, _ in pairs for number in (*packed.layout, len(packed.scales))]
    values, scales = [p.values for p, _ in pairs], [s for p, _ in pairs for s in p.scales]
    found = torch.ops.monograph.linear_shared(x, values, scales, layouts, [], [], [], [])
    for got, (packed, _) in zip(found, pairs, strict=True):
        assert torch.equal(got, torch.ops.monograph.linear(x, *arguments(packed), None, None, None, None))


@pytest.mark.parametrize("name", NAMES)
def test_a_head_has_the_loss_and_gradients_of_the_decoded_one(name):
    packed, dense = random_weight(name, 133, 256, 11, shuffled(133))
    labels = torch.arange(9) * 7
    found = []
    for weight in (arguments(packed), (dense, [], [0, 0, 133, 256])):
        torch.manual_seed(0)
        x = torch.randn(9, 256, requires_grad=True)
        loss = linear_cross_entropy(x, *weight, labels).sum()
        loss.backward()
        found.append((loss.detach(), x.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_stack_is_grids_of_rows_in_order():
    """A stack [experts, rows, cols], by the check that all operators share."""
    blocks = torch.from_numpy(random_blocks("q4_k", 3 * 8, 256, 12))
    stack = PackedWeight(GGML_FORMATS["q4_k"], (3, 8, 256), 256, blocks, (), torch.bfloat16)
    with pytest.raises(RuntimeError, match="the weight has 3 matrices, format q4_k wants one"):
        stack.dequantize()
    flat = replace(stack, shape=(24, 256)).dequantize()
    assert torch.equal(replace(stack, grid_rows=8).dequantize().reshape(24, 256), flat)
    mapped = replace(stack, grid_rows=8, scales=(torch.zeros(24, dtype=torch.int32).view(torch.uint8),))
    with pytest.raises(RuntimeError, match="a row map and grids of 8 rows, format q4_k wants one matrix"):
        mapped.dequantize()


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_a_weight(name, mapped):
    packed, want = random_weight(name, 21, 256, 3, shuffled(21) if mapped else None)
    for first in range(21):
        for count in {0, 1, min(3, 21 - first), 21 - first}:
            part = packed.slice_rows(first, count)
            assert same_bits(part.dequantize(torch.float32), want[first : first + count])
            assert same_bits(
                portable_dequantize(*arguments(part), torch.float32), want[first : first + count]
            )
            if count > 1:
                again = part.slice_rows(1, count - 1)
                assert same_bits(again.dequantize(torch.float32), want[first + 1 : first + count])


@pytest.mark.parametrize("name", ["q8_0", "q4_k"])
def test_bytes_at_any_address(name):
    packed, want = random_weight(name, 9, 256, 4)
    buffer = torch.empty(packed.values.numel() + 1, dtype=torch.uint8)
    buffer[1:] = packed.values.reshape(-1)
    moved = ggml_weight(buffer[1:], name, 256)
    assert moved.values.data_ptr() % 2 == 1
    assert same_bits(moved.dequantize(torch.float32), want)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name, mapped):
    packed, _ = random_weight(name, 24, 256, 5, shuffled(24) if mapped else None)
    x = torch.randn(3, 256, requires_grad=True)
    torch.library.opcheck(torch.ops.monograph.linear.default, (x, *arguments(packed), None, None, None, None))
    torch.library.opcheck(torch.ops.monograph.dequantize.default, (*arguments(packed), torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_one_graph_for_all_lengths_with_the_gradients_of_eager(name):
    """By Inductor, with a LoRA beside the layer: no break, no second graph, gradients of eager."""
    layer = QuantLinear(random_weight(name, 64, 256, 6, shuffled(64))[0])
    a = (torch.randn(4, 256) * 0.1).requires_grad_()
    b = (torch.randn(64, 4) * 0.1).requires_grad_()

    def step(x):
        return layer(x) + x @ a.t() @ b.t()

    graphs = torch._dynamo.utils.counters
    torch._dynamo.reset()
    graphs.clear()
    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for length in (3, 5, 17, 33):
        results = []
        for run in (step, compiled):
            torch.manual_seed(length)
            x = torch.randn(length, 256, requires_grad=True)
            y = run(x)
            y.square().mean().backward()
            results.append((y.detach(), x.grad, a.grad, b.grad))
            a.grad = b.grad = None
        for eager, traced in zip(*results, strict=True):
            assert torch.allclose(eager, traced, rtol=1e-4, atol=1e-5)
    assert graphs["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_on_the_dense_weight(name, mapped):
    """LoRA's and the bias's too, bit by bit: the operator on the packed weight and on the decoded one."""
    packed, dense = random_weight(name, 133, 512, 7, shuffled(133) if mapped else None)
    found = []
    for weight in (arguments(packed), (dense, [], [0, 0, 133, 512])):
        torch.manual_seed(0)
        x = torch.randn(9, 512, requires_grad=True)
        a, b = torch.randn(4, 512, requires_grad=True), torch.randn(133, 4, requires_grad=True)
        bias = torch.randn(133, requires_grad=True)
        y = torch.ops.monograph.linear(x, *weight, bias, x @ a.t(), b, None)
        y.square().sum().backward()
        found.append((y.detach(), x.grad, a.grad, b.grad, bias.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_the_rotary_row_map_undoes_llama_cpp_order():
    """gguf's converter turns [heads, 2, half] to [heads, half, 2]; the map gives the folder's order back."""
    heads, cols = 4, 256
    folder = random_blocks("q8_0", 64, cols, 8)
    stored = folder.reshape(heads, 2, 8, -1).swapaxes(1, 2).reshape(folder.shape)
    row_map = rotary_row_map(64, heads)
    packed = ggml_weight(torch.from_numpy(np.ascontiguousarray(stored)), "q8_0", cols, row_map=row_map)
    assert same_bits(packed.dequantize(torch.float32), gguf_values("q8_0", folder))
    wrong = ggml_weight(torch.from_numpy(np.ascontiguousarray(stored)), "q8_0", cols)
    assert not same_bits(wrong.dequantize(torch.float32), gguf_values("q8_0", folder))


def refusal(call, *args):
    with pytest.raises((RuntimeError, ValueError)) as error:
        call(*args)
    return str(error.value)


@pytest.mark.parametrize("call", [torch.ops.monograph.dequantize, portable_dequantize])
def test_what_does_not_fit_is_refused_by_name(call):
    packed, _ = random_weight("q4_k", 9, 512, 9, shuffled(9))
    values, (row_map,), layout = arguments(packed)
    bf16 = torch.bfloat16
    assert "values has 2591 bytes, wanted 2592" in refusal(call, values.reshape(-1)[1:], [], layout, bf16)
    some = values.reshape(-1)[1:]
    assert "values has 2591 bytes, wanted rows of 288" in refusal(call, some, [row_map], layout, bf16)
    assert "scales[0] (row map) has 32 bytes, wanted 36" in refusal(call, values, [row_map[4:]], layout, bf16)
    two = [row_map, row_map]
    assert "format q4_k wants none, or 1 (row map)" in refusal(call, values, two, layout, bf16)
    assert "block size is 32, format q4_k wants" in refusal(call, values, [], [26, 32, 9, 512], bf16)
    wanted = "rows have 320 elements, format q4_k wants a multiple of 256"
    assert wanted in refusal(call, values, [], [26, 256, 9, 320], bf16)
    wanted = "the weight has 3 matrices, format q4_k wants one"
    assert wanted in refusal(call, values, [], [26, 256, 3, 3, 512], bf16)


def test_a_row_that_is_not_there_is_refused():
    packed, _ = random_weight("q4_0", 4, 64, 10)
    for wrong in (4, -1):
        row_map = torch.tensor([0, 1, wrong, 3], dtype=torch.int32)
        message = f"scales[0] (row map) has the row {wrong}, values has 4 rows"
        call = torch.ops.monograph.dequantize
        found = refusal(call, packed.values, [row_map.view(torch.uint8)], packed.layout, torch.bfloat16)
        assert message in found
        with pytest.raises(ValueError, match=f"row_map has the row {wrong}, values has 4 rows"):
            ggml_weight(packed.values, "q4_0", 64, row_map=row_map)


def test_nothing_quantises_to_them():
    for name, fmt in GGML_FORMATS.items():
        message = f"format {name} is read and trained on, nothing quantises to it"
        with pytest.raises(ValueError, match=message):
            mg.quantize(torch.randn(4, 256), name)
        with pytest.raises(RuntimeError, match=message):
            torch.ops.monograph.quantize(torch.randn(4, 256), fmt.number, fmt.block_sizes[0], False, False)
