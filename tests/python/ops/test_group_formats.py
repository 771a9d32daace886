"""int4, int8 and FP8 with scales of rows or groups of them: operators against numpy, graphs, gradients."""

import pytest
import torch

from monograph.nn import QuantLinear
from monograph.ops.dequantize import fused_dequantize, portable_dequantize
from monograph.ops.formats import GROUP_FORMATS, ZeroPoints
from support.group_weights import CASES, SHAPES, group_weight, misaligned

pytestmark = pytest.mark.per_isa
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BF16 = [case for case in CASES if case[0].endswith("bf16")]


def arguments(packed):
    return packed.values, list(packed.scales), packed.layout


def same(got, want):
    return got.dtype == want.dtype and torch.equal(got, want)


@pytest.mark.parametrize(("name", "symmetric"), CASES)
def test_dequantize_is_the_exact_number_rounded(name, symmetric):
    for shape in SHAPES:
        w = group_weight(name, shape, symmetric)
        for dtype in DTYPES:
            want = w.dense(dtype)
            assert same(w.packed.dequantize(dtype), want)
            assert same(misaligned(w.packed).dequantize(dtype), want)
            assert same(portable_dequantize(*arguments(w.packed), dtype), want)
            assert same(fused_dequantize(*arguments(w.packed), dtype), want)


@pytest.mark.parametrize("name", GROUP_FORMATS)
def test_one_scale_for_all(name):
    w = group_weight(name, (133, 500, 500), True, one=True)
    assert w.packed.scales[0].numel() in (2, 4)
    assert same(w.packed.dequantize(torch.float32), w.dense(torch.float32))
    assert same(portable_dequantize(*arguments(w.packed), torch.float32), w.dense(torch.float32))


def test_the_portable_form_decodes_panel_by_panel():
    w = group_weight("int4-fp16", (1500, 500, 20), False)  # more elements than a panel
    assert same(portable_dequantize(*arguments(w.packed), torch.bfloat16), w.dense(torch.bfloat16))


@pytest.mark.parametrize(("name", "symmetric"), CASES)
def test_linear_and_dx_are_those_of_the_decoded_weight_at_any_batch(name, symmetric):
    """Bit by bit: both go through the same products."""
    for shape in SHAPES:
        w = group_weight(name, shape, symmetric)
        for dtype in (torch.bfloat16, torch.float32):
            dense, plain = w.dense(dtype), [0, 0, *shape[:2]]
            for batch in (1, 7, 40):
                torch.manual_seed(batch)
                x, dy = torch.randn(batch, shape[1], dtype=dtype), torch.randn(batch, shape[0], dtype=dtype)
                got = torch.ops.monograph.linear(x, *arguments(w.packed), None, None, None, None)
                want = torch.ops.monograph.linear(x, dense, [], plain, None, None, None, None)
                assert same(got, want)
                got = torch.ops.monograph.linear_dx(dy, *arguments(w.packed), None, None)
                assert same(got, torch.ops.monograph.linear_dx(dy, dense, [], plain, None, None))
                assert torch.allclose(want.float(), x.float() @ dense.float().t(), rtol=0.02, atol=0.05)


@pytest.mark.parametrize(("name", "symmetric"), BF16)
def test_rows_of_a_weight(name, symmetric):
    w = group_weight(name, (21, 100, 50), symmetric)
    want = w.dense(torch.float32)
    for first in range(21):
        for count in (0, 1, 3, 21 - first):
            if first + count > 21:
                continue
            part = w.packed.slice_rows(first, count)
            assert same(part.dequantize(torch.float32), want[first : first + count])
            assert same(portable_dequantize(*arguments(part), torch.float32), want[first : first + count])
            if count > 1:
                again = part.slice_rows(1, count - 1)
                assert same(again.dequantize(torch.float32), want[first + 1 : first + count])


@pytest.mark.parametrize(("name", "symmetric"), BF16)
def test_opcheck(name, symmetric):
    w = group_weight(name, (24, 96, 48), symmetric)
    x = torch.randn(3, 96, dtype=torch.float32, requires_grad=True)
    torch.library.opcheck(
        torch.ops.monograph.linear.default, (x, *arguments(w.packed), None, None, None, None)
    )
    torch.library.opcheck(torch.ops.monograph.dequantize.default, (*arguments(w.packed), torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "symmetric"), BF16)
def test_one_graph_for_all_lengths_with_the_gradients_of_eager(name, symmetric):
    """By Inductor, with a LoRA beside the layer: no break, no second graph, gradients of eager."""
    w = group_weight(name, (64, 96, 48), symmetric)
    layer = QuantLinear(w.packed)
    a = (torch.randn(4, 96) * 0.1).requires_grad_()
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
            x = torch.randn(length, 96, requires_grad=True)
            y = run(x)
            y.square().sum().backward()
            results.append((y.detach(), x.grad, a.grad, b.grad))
            a.grad = b.grad = None
        for eager, traced in zip(*results, strict=True):
            assert torch.allclose(eager, traced, rtol=1e-5, atol=1e-6)
    assert graphs["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(("name", "symmetric"), BF16)
def test_gradients_are_those_on_the_dense_weight(name, symmetric):
    """LoRA's too, bit by bit: the operator on the packed weight and on the decoded one."""
    w = group_weight(name, (133, 500, 20), symmetric)
    found = []
    dense = w.dense(torch.float32)
    for weight in (arguments(w.packed), (dense, [], [0, 0, 133, 500])):
        torch.manual_seed(0)
        x = torch.randn(9, 500, requires_grad=True)
        a, b = torch.randn(4, 500, requires_grad=True), torch.randn(133, 4, requires_grad=True)
        u = x @ a.t()
        y = torch.ops.monograph.linear(x, *weight, None, u, b, None)
        y.square().sum().backward()
        found.append((y.detach(), x.grad, a.grad, b.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def refusal(call, *args):
    with pytest.raises((RuntimeError, ValueError)) as error:
        call(*args)
    return str(error.value)


@pytest.mark.parametrize("call", [torch.ops.monograph.dequantize, portable_dequantize])
def test_what_does_not_fit_is_refused_by_name(call):
    w = group_weight("int4-fp16", (9, 64, 32), False).packed
    values, scales, layout = arguments(w)
    dtype = torch.bfloat16
    wrong = [
        ((values[:-1], scales, layout), "values has .* bytes, wanted 288"),
        ((values, [scales[0][:-1], scales[1]], layout), r"scales\[0\] \(float16\) has 35 bytes, wanted 36"),
        (
            (values, [scales[0], scales[1][:-1]], layout),
            r"scales\[1\] \(zero points\) has 15 bytes, wanted 16",
        ),
        ((values, [scales[0][:2], scales[1]], layout), "one scale beside zero points, wanted 18"),
        ((values, [*scales, scales[0]], layout), "scales has 3 tensors"),
        ((values, scales, [9, 0, 9, 64]), "block size is 0, format int4-fp16 wants 1 or more"),
        ((values, scales, [9, -1, 9, 64]), "block size is -1"),
        ((values, scales, [9, 48, 9, 64]), "wants a multiple of 48"),
        ((values, scales, [9, 32, 3, 3, 64]), "3 matrices, format int4-fp16 wants one"),
        ((values, scales, [-1, 9, 32, 2, 9, 64, 0, 3]), r"scales\[1\] has 16 bytes, wanted as many for each"),
        ((values, scales, [9, 1, 2**40, 2**40]), "too many elements"),
        ((values, scales, [200, 32, 9, 64]), "not the number of a packed format"),
    ]
    import re

    for parts, message in wrong:
        assert re.search(message, refusal(call, *parts, dtype)), message


def test_types_of_scales_are_told_apart():
    """The same bytes, another number of the format, another weight."""
    one = group_weight("int4-bf16", (8, 64, 32), True)
    other = [GROUP_FORMATS["int4-fp16"].number, *one.packed.layout[1:]]
    values, scales, layout = arguments(one.packed)
    first = torch.ops.monograph.dequantize(values, scales, layout, torch.float32)
    second = torch.ops.monograph.dequantize(values, scales, other, torch.float32)
    assert same(first, one.dense(torch.float32))
    assert not torch.allclose(first, second)


def test_names_and_numbers():
    assert [fmt.number for fmt in GROUP_FORMATS.values()] == list(range(8, 20))
    for name, fmt in GROUP_FORMATS.items():
        assert fmt.name == name
        assert (fmt.zero_points is ZeroPoints.NONE) == name.startswith("fp8-row")
