"""What the GPU's operators do between their kernels, on CPU tensors: panels decoded and multiplied.

ops/cuda/tests/panels_on_cpu.cpp holds the same functions with the CPU's decoder. The reference is a float64
product with the dequantised weight; the bounds are those of fp32 sums and of the roundings that are made.
"""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import monograph as mg
from monograph.ops.layout import plain_layout
from support.native_tool import program

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
WHOLE = 1 << 26


@pytest.fixture(scope="module", autouse=True)
def library():
    torch.ops.load_library(program("panels_on_cpu.so", "ops"))


def packed(name, rows, cols, double_quant=False):
    weight = mg.quantize(torch.randn(rows, cols) * 0.1, name, double_quant=double_quant)
    return (weight.values, list(weight.scales), list(weight.layout)), weight.dequantize


def within(found, terms, dtype, roundings=None):
    """`terms` are (left, right) whose products sum to the result, in the order of their roundings."""
    exact = sum(left.double() @ right.double() for left, right in terms)
    size = sum(left.double().abs() @ right.double().abs() for left, right in terms)
    depth = sum(left.shape[-1] for left, _ in terms)
    # Each term but the last is rounded to the type on its way; sums are fp32 in any order.
    steps = (roundings or len(terms)) * ROUNDING[dtype] * 1.01
    bound = size * (steps + depth * 2.0**-24 * 1.01) + 1e-7
    error = (found.double() - exact).abs()
    assert bool((error <= bound).all()), float((error / bound).max())


CASES = [
    ("nf4", True, torch.bfloat16),
    ("nf4", False, torch.float32),
    ("fp4", True, torch.float16),
    ("mxfp4", False, torch.bfloat16),
    ("mxfp8", False, torch.bfloat16),
    ("nvfp4", False, torch.float32),
    ("fp8-block", False, torch.bfloat16),
]


@pytest.mark.parametrize(("name", "double_quant", "dtype"), CASES)
@pytest.mark.parametrize("panel_bytes", [WHOLE, 1 << 15])
def test_products_by_panels_are_those_of_the_dequantised_weight(name, double_quant, dtype, panel_bytes):
    torch.manual_seed(0)
    rows, cols, rank = 300, 448, 5
    weight, dequantize = packed(name, rows, cols, double_quant)
    dense = dequantize(dtype)
    x, dy = torch.randn(2, 3, cols).to(dtype), torch.randn(2, 3, rows).to(dtype)
    u, du = torch.randn(2, 3, rank).to(dtype), torch.randn(2, 3, rank).to(dtype)
    b, a, bias = torch.randn(rows, rank), torch.randn(rank, cols), torch.randn(rows).to(dtype)
    one = torch.ones(6, 1, dtype=dtype)
    ops = torch.ops.monograph_panels
    y = ops.linear(x, *weight, bias, u, b, panel_bytes)
    low = (u.reshape(6, -1), b.to(dtype).t())
    within(y.reshape(6, -1), [(one, bias[None]), low, (x.reshape(6, -1), dense.t())], dtype)
    assert y.shape == (2, 3, rows)
    y = ops.linear(x, *weight, bias, None, None, panel_bytes)
    within(y.reshape(6, -1), [(one, bias[None]), (x.reshape(6, -1), dense.t())], dtype)
    dx = ops.linear_dx(dy, *weight, du, a, panel_bytes)
    within(dx.reshape(6, -1), [(du.reshape(6, -1), a.to(dtype)), (dy.reshape(6, -1), dense)], dtype)
    dx = ops.linear_dx(dy, *weight, None, None, panel_bytes)
    within(dx.reshape(6, -1), [(dy.reshape(6, -1), dense)], dtype)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_a_plain_weight_is_multiplied_as_it_is_or_converted(kind):
    torch.manual_seed(0)
    w, x, dy = torch.randn(300, 96).to(kind), torch.randn(7, 96).bfloat16(), torch.randn(7, 300).bfloat16()
    weight = (w, [], plain_layout(w.shape))
    dense = w.bfloat16()
    for panel_bytes in (WHOLE, 1):
        y = torch.ops.monograph_panels.linear(x, *weight, None, None, None, panel_bytes)
        within(y, [(x, dense.t())], torch.bfloat16)
        dx = torch.ops.monograph_panels.linear_dx(dy, *weight, None, None, panel_bytes)
        within(dx, [(dy, dense)], torch.bfloat16)


def test_rows_of_any_stride_and_sizes_of_none():
    torch.manual_seed(0)
    weight, dequantize = packed("nf4", 40, 64)
    wide = torch.randn(5, 200)
    y = torch.ops.monograph_panels.linear(wide[:, 7:71], *weight, None, None, None, WHOLE)
    within(y, [(wide[:, 7:71], dequantize(torch.float32).t())], torch.float32)
    none = torch.ops.monograph_panels.linear(wide[:0, :64], *weight, None, None, None, WHOLE)
    assert none.shape == (0, 40)
    hollow = (torch.empty(40, 0), [], plain_layout((40, 0)))
    bias = torch.randn(40)
    y = torch.ops.monograph_panels.linear(torch.empty(3, 0), *hollow, bias, None, None, WHOLE)
    assert torch.equal(y, bias.expand(3, 40))
    y = torch.ops.monograph_panels.linear(torch.empty(3, 0), *hollow, None, None, None, WHOLE)
    assert torch.equal(y, torch.zeros(3, 40))


@pytest.mark.parametrize(("name", "double_quant", "dtype"), CASES)
def test_a_job_of_few_rows_has_all_that_the_operator_was_given(name, double_quant, dtype):
    """Strided x and u, b and bias as views, b in another type, gain before the bias, one rounding."""
    torch.manual_seed(0)
    rows, cols, rank = 70, 128, 5
    weight, dequantize = packed(name, rows, cols, double_quant)
    dense = dequantize(dtype)
    x = torch.randn(2, 3, cols + 9).to(dtype)[..., 4 : cols + 4]
    u = torch.randn(2, 3, rank + 2).to(dtype)[..., 1 : rank + 1]
    b, gain = torch.randn(rank, rows).t(), torch.rand(2 * rows)[::2] + 0.5
    bias = torch.randn(2 * rows).to(dtype)[::2]
    one = torch.ones(6, 1, dtype=dtype)
    ops = torch.ops.monograph_panels
    product, low = (x.reshape(6, -1), dense.t()), (u.reshape(6, -1), b.to(dtype).t())
    within(ops.few_rows(x, *weight, None, None, None, None).reshape(6, -1), [product], dtype)
    y = ops.few_rows(x, *weight, bias, u, b, gain)
    scaled = [(left.double(), right.double() * gain) for left, right in (low, product)]
    within(y.reshape(6, -1), [(one, bias[None]), *scaled], dtype, roundings=1)
    assert y.shape == (2, 3, rows)
    assert ops.few_rows(x[:0], *weight, bias, u[:0], b, gain).shape == (0, 3, rows)


@pytest.mark.parametrize(("capability", "most"), [(80, 16), (89, 64), (75, 16), (121, 16)])
def test_the_table_of_crossovers_decides(capability, most):
    """core/monograph/gpu/crossover.cpp; none of its rows is measured."""
    takes = torch.ops.monograph_panels.takes_few_rows
    weight, _ = packed("nf4", 8, 64)
    for dtype, rows in ((torch.bfloat16, most), (torch.float16, most), (torch.float32, 8)):
        assert takes(capability, torch.empty(rows, 64, dtype=dtype), *weight)
        assert not takes(capability, torch.empty(rows + 1, 64, dtype=dtype), *weight)
    plain = torch.empty(8, 64)
    assert not takes(capability, torch.empty(1, 64), plain, [], plain_layout(plain.shape))


def allocated(function, *arguments):
    """Bytes that a call allocates, all summed."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        function(*arguments)
    return sum(max(event.self_cpu_memory_usage, 0) for event in recorded.events())


def test_scratch_is_one_panel_however_large_the_weight():
    """cut_panels() of core: whole multiples of 128 rows or columns within the bytes of a panel."""
    torch.manual_seed(0)
    rows, cols, bound = 2048, 512, 1 << 18
    weight, _ = packed("nf4", rows, cols, double_quant=True)
    x, dy = torch.randn(64, cols).bfloat16(), torch.randn(64, rows).bfloat16()
    forward = allocated(torch.ops.monograph_panels.linear, x, *weight, None, None, None, bound)
    assert forward <= 64 * rows * 2 + bound
    # Columns are 4096 bytes in bf16: 128 of them, the least there is, are more than the bytes asked for.
    backward = allocated(torch.ops.monograph_panels.linear_dx, dy, *weight, None, None, bound)
    assert backward <= 64 * cols * 2 + max(bound, 128 * rows * 2)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("logits_bytes", [1 << 28, 300 * 4 * 3])
def test_the_loss_by_chunks_is_torchs(softcap, logits_bytes):
    """In float32: sums of 64 products, logits below 16; chunks of 3 tokens of 10, or of all."""
    torch.manual_seed(0)
    weight, dequantize = packed("nf4", 300, 64, double_quant=True)
    x, bias = torch.randn(2, 5, 64), torch.randn(300)
    labels = torch.randint(0, 300, (2, 5))
    labels[0, 1] = labels[1, 4] = -100
    arguments = (bias, labels, softcap, 0.5, True, 1 << 15, logits_bytes)
    loss, lse, dx = torch.ops.monograph_panels.linear_cross_entropy(x, *weight, *arguments)
    exact = x.double().requires_grad_()
    z = torch.nn.functional.linear(exact, dequantize(torch.float32).double(), bias.double()) * 0.5
    z = softcap * torch.tanh(z / softcap) if softcap else z
    wanted = torch.nn.functional.cross_entropy(z.reshape(10, -1), labels.reshape(-1), reduction="none")
    wanted.sum().backward()
    counts = labels.reshape(-1) != -100
    torch.testing.assert_close(loss.double(), wanted.detach(), rtol=0, atol=2e-5)
    torch.testing.assert_close(
        lse.double()[counts], z.reshape(10, -1).logsumexp(1)[counts], rtol=0, atol=2e-5
    )
    torch.testing.assert_close(dx.double(), exact.grad, rtol=0, atol=2e-6)
    assert not dx[0, 1].any()
    assert not lse[~counts].any()


def test_linear_adds_a_matrix_in_the_place_of_a_bias():
    """products.cpp relies on it: addmm's factors cannot cross the stable ABI."""
    torch.manual_seed(0)
    x, w, start = torch.randn(6, 9), torch.randn(4, 9), torch.randn(6, 4)
    out = start.clone()
    torch.ops.aten.linear.out(x, w, out, out=out)
    torch.testing.assert_close(out, start + x @ w.t())
