"""linear_scaled: a gain on the float32 sums, DoRA's, with its gradients."""

import pytest
import torch
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import monograph as mg
from monograph.ops.linear import linear, plain_linear
from monograph.ops.linear_scaled import linear_scaled, portable_linear_scaled

pytestmark = pytest.mark.per_isa

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROUND = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-22}


def arguments(dtype, tokens=(2, 9), rows=72, cols=96, rank=4):
    torch.manual_seed(0)
    w = mg.quantize(torch.randn(rows, cols), "nf4", block_size=32)
    x, a, b = torch.randn(*tokens, cols).to(dtype), 0.3 * torch.randn(rank, cols), torch.randn(rows, rank)
    gain = 1 + 0.1 * torch.randn(rows)
    return x, (w.values, list(w.scales), w.layout), gain, a.to(dtype), b.to(dtype)


def call(x, packed, gain, a, b, function=linear_scaled):
    return function(x, *packed, gain, plain_linear(x, a).detach(), b, a)


def exact(x, packed, gain, a, b):
    """float64 on the weight that the kernels multiply with, and on u as it is rounded."""
    weight = torch.ops.monograph.dequantize(*packed, x.dtype).double()
    u = plain_linear(x.to(a.dtype), a)
    return gain.double() * (x.double() @ weight.t() + u.double() @ b.double().t())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_is_one_rounding(dtype):
    made = arguments(dtype)
    want = exact(*made)
    # The sums of 100 products in float32 add 2^-24 of their magnitudes, at most about 30 of the result's.
    bound = 1.01 * ROUND[dtype] * want.abs() + 2**-17
    assert ((call(*made).double() - want).abs() <= bound).all()
    portable = call(*made, function=portable_linear_scaled).double()
    # Rounds both products and their sum before.
    assert ((portable - want).abs() <= 4 * bound + 4 * ROUND[dtype] * want.abs().mean()).all()


def test_a_gain_of_one_gives_the_bits_of_linear_and_a_power_of_two_scales_them():
    for dtype in DTYPES:
        x, packed, gain, a, b = arguments(dtype)
        plain = linear(x, *packed, None, plain_linear(x, a), b, a)
        assert torch.equal(call(x, packed, torch.ones_like(gain), a, b), plain)
        assert torch.equal(call(x, packed, torch.full_like(gain, 0.25), a, b), 0.25 * plain)
        alone = torch.cat([call(row[None], packed, gain, a, b) for row in x.reshape(-1, x.shape[-1])])
        assert torch.equal(alone, call(x, packed, gain, a, b).reshape(alone.shape))


@pytest.mark.parametrize("change", [1e-3, 1e-4])
def test_a_small_change_of_the_gain_shows_in_bf16(change):
    """Over many elements rounding to nearest of unrounded sums is unbiased; after a rounding it is blind."""
    x, packed, gain, a, b = arguments(torch.bfloat16, tokens=(512,))
    before = call(x, packed, torch.ones_like(gain), a, b).double()
    after = call(x, packed, torch.full_like(gain, 1 + change), a, b).double()
    slope = (after - before).mul(before).sum() / before.square().sum()
    # 36,864 roundings, each off by at most 2^-8 of its element with variance 2^-16 / 12 (twice).
    deviation = (2 * 2**-16 / 12 / before.numel()) ** 0.5
    assert abs(slope - change) <= 5 * deviation
    assert 5 * deviation < 0.1 * 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_against_float64(dtype):
    made = arguments(dtype)
    x, packed, gain, a, b = made
    leaves = [t.detach().clone().requires_grad_() for t in (x, gain, a, b)]
    y = call(leaves[0], packed, *leaves[1:])
    dy = torch.randn(y.shape).to(dtype)
    got = torch.autograd.grad(y, leaves, dy)
    weight = torch.ops.monograph.dequantize(*packed, dtype).double()
    wide = [t.detach().double().requires_grad_() for t in (x, gain, a, b)]
    reference = wide[1] * (wide[0] @ weight.t() + wide[0] @ wide[2].t() @ wide[3].t())
    want = torch.autograd.grad(reference, wide, dy.double())
    for name, ours, expected in zip(("x", "gain", "a", "b"), got, want, strict=True):
        error = (ours.double() - expected).norm() / expected.norm()
        # Each factor of a sum carries at most two roundings to the dtype; norms see their root mean square.
        assert error <= (2**-17 if dtype == torch.float32 else 2 * 2**-9), (name, error)


def test_without_a_gradient_of_the_gain_nothing_of_it_is_kept():
    x, packed, gain, a, b = arguments(torch.float32)
    y = call(x.requires_grad_(), packed, gain, a.requires_grad_(), b)
    kept = [t for t in y.grad_fn.saved_tensors if t is not None]
    assert not any(t.data_ptr() == y.data_ptr() for t in kept)


def test_opcheck_flops_autocast_and_misuse():
    x, packed, gain, a, b = arguments(torch.float32)
    u = plain_linear(x, a)
    leaves = [t.detach().requires_grad_() for t in (x, gain, b, a)]
    opcheck(torch.ops.monograph.linear_scaled, (leaves[0], *packed, leaves[1], u, leaves[2], leaves[3]))
    with FlopCounterMode(display=False) as counter:
        call(x, packed, gain, a, b)
    assert counter.get_total_flops() == 2 * 18 * 72 * (96 + 4) + 2 * 18 * 4 * 96
    with torch.amp.autocast("cpu", torch.bfloat16):
        y = call(x, packed, gain, a, b)
    assert torch.equal(
        y, call(*(t.bfloat16() if i in (0, 3, 4) else t for i, t in enumerate(arguments(torch.float32))))
    )
    with pytest.raises(RuntimeError, match=r"gain is bfloat16, wanted float32"):
        linear_scaled(x, *packed, gain.bfloat16(), u, b, a)
    with pytest.raises(RuntimeError, match=r"gain has 71 columns, wanted 72"):
        linear_scaled(x, *packed, gain[1:], u, b, a)
    weight = torch.randn(72, 96, requires_grad=True)
    with pytest.raises(ValueError, match="the weight requires a gradient"):
        linear_scaled(x, weight, [], [0, 0, 72, 96], gain, u, b, a)


def test_one_graph_over_lengths():
    _, packed, gain, a, b = arguments(torch.bfloat16)
    leaves = [t.detach().requires_grad_() for t in (gain, a, b)]
    graph = torch.compile(
        lambda x, *rest: call(x, packed, *rest), backend="aot_eager", fullgraph=True, dynamic=True
    )
    for tokens in (3, 17, 40):
        x = torch.randn(tokens, 96).bfloat16().requires_grad_()
        found = []
        for function in (graph, lambda x, *rest: call(x, packed, *rest)):
            y = function(x, *leaves)
            found.append((y, *torch.autograd.grad(y, [x, *leaves], torch.ones_like(y))))
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)


def test_factors_that_lie_transposed_in_memory():
    x, packed, gain, a, b = arguments(torch.float32)
    found = []
    for low in (b, b.t().contiguous().t()):
        leaf = low.detach().requires_grad_()
        y = linear(x, *packed, None, plain_linear(x, a), leaf, a) + call(x, packed, gain, a, leaf)
        found.append((y, *torch.autograd.grad(y.sum(), [leaf])))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
