"""linear_shared: several weights on one x give the bits of one call each, and one gradient pass."""

import pytest
import torch
import torch.utils.checkpoint
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import monograph as mg
from monograph.ops.linear import linear, linear_dx, plain_linear
from monograph.ops.linear_shared import linear_shared, portable_linear_shared, portable_linear_shared_dx

pytestmark = pytest.mark.per_isa

ROWS = (48, 16, 33)


def weights(cols=96):
    torch.manual_seed(0)
    packed = [mg.quantize(torch.randn(n, cols), double_quant=n != 16) for n in ROWS]
    return [w.values for w in packed], [list(w.scales) for w in packed], [w.layout for w in packed]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_outputs_have_the_bits_of_single_calls(dtype):
    values, scales, layouts = weights()
    x = torch.randn(2, 7, 96).to(dtype)
    bias = [torch.randn(n).to(dtype) for n in ROWS]
    u = [torch.randn(2, 7, r).to(dtype) for r in (4, 8, 4)]
    b = [torch.randn(n, r).to(dtype) for n, r in zip(ROWS, (4, 8, 4), strict=True)]
    outputs = linear_shared(x, values, scales, layouts, bias, u, b)
    for i, y in enumerate(outputs):
        assert torch.equal(y, linear(x, values[i], scales[i], layouts[i], bias[i], u[i], b[i]))
    for y, want in zip(linear_shared(x, values, scales, layouts), values, strict=True):
        assert y.shape[-1] == want.shape[0]


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_against_single_calls(fused):
    values, scales, layouts = weights()

    def leaves():
        torch.manual_seed(1)
        x = torch.randn(5, 96, requires_grad=True)
        a = [torch.randn(4, 96, requires_grad=True) for _ in ROWS]
        b = [torch.randn(n, 4, requires_grad=True) for n in ROWS]
        u = [torch.randn(5, 4, requires_grad=True) for _ in ROWS]
        bias = [torch.randn(n, requires_grad=True) for n in ROWS]
        return x, a, b, u, bias

    x, a, b, u, bias = leaves()
    low = [plain_linear(x, m).detach() for m in a] if fused else u
    outputs = linear_shared(x, values, scales, layouts, bias, low, b, a if fused else ())
    dy = [torch.randn_like(y) for y in outputs]
    torch.autograd.backward(outputs, dy)

    x1, a1, b1, u1, bias1 = leaves()
    low = [plain_linear(x1, m).detach() for m in a1] if fused else u1
    for i in range(len(ROWS)):
        own_a = a1[i] if fused else None
        linear(x1, values[i], scales[i], layouts[i], bias1[i], low[i], b1[i], own_a).backward(dy[i])
    torch.testing.assert_close(x.grad, x1.grad)
    for mine, single in ((b, b1), (bias, bias1), (a, a1) if fused else (u, u1)):
        for left, right in zip(mine, single, strict=True):
            torch.testing.assert_close(left.grad, right.grad)


def test_a_checkpointed_gradient_has_a_gradient():
    """Non-reentrant checkpointing gives saved tensors out once."""
    values, scales, layouts = weights()
    x = torch.randn(5, 96, requires_grad=True)
    gradients = [torch.randn(5, n, requires_grad=True) for n in ROWS]

    def dx(*dy):
        outputs = linear_shared(x, values, scales, layouts)
        return torch.autograd.grad(outputs, x, dy, create_graph=True)[0]

    plain = torch.autograd.grad(dx(*gradients).square().sum(), gradients)
    made = torch.utils.checkpoint.checkpoint(dx, *gradients, use_reentrant=False)
    again = torch.autograd.grad(made.square().sum(), gradients)
    assert all(torch.equal(left, right) for left, right in zip(plain, again, strict=True))


def test_dx_is_one_chain_over_all_terms():
    values, scales, layouts = weights()
    flat = [s for own in scales for s in own]
    numbers = [n for layout, own in zip(layouts, scales, strict=True) for n in (*layout, len(own))]
    dy = [torch.randn(5, n) for n in ROWS]
    du, a = [torch.randn(5, 4) for _ in ROWS], [torch.randn(4, 96) for _ in ROWS]
    got = torch.ops.monograph.linear_shared_dx(dy, values, flat, numbers, du, a)
    singles = sum(
        linear_dx(g, v, s, layout, d, m).double()
        for g, v, s, layout, d, m in zip(dy, values, scales, layouts, du, a, strict=True)
    )
    torch.testing.assert_close(got.double(), singles, rtol=1e-5, atol=1e-5)
    portable = portable_linear_shared_dx(dy, values, flat, numbers, du, a)
    torch.testing.assert_close(got, portable, rtol=1e-4, atol=1e-4)
    for m in (1, 2, 5):
        part = torch.ops.monograph.linear_shared_dx(
            [g[:m] for g in dy], values, flat, numbers, [d[:m] for d in du], a
        )
        assert torch.equal(part, got[:m])


def test_opcheck_flops_and_autocast():
    values, scales, layouts = weights()
    flat = [s for own in scales for s in own]
    numbers = [n for layout, own in zip(layouts, scales, strict=True) for n in (*layout, len(own))]
    x = torch.randn(5, 96, requires_grad=True)
    u = [torch.randn(5, 4, requires_grad=True) for _ in ROWS]
    b = [torch.randn(n, 4, requires_grad=True) for n in ROWS]
    ops = torch.ops.monograph
    opcheck(ops.linear_shared, (x, values, flat, numbers, [], [], [], []))
    opcheck(ops.linear_shared, (x, values, flat, numbers, [], u, b, []))
    opcheck(ops.linear_shared_dx, ([torch.randn(5, n) for n in ROWS], values, flat, numbers, [], []))
    with FlopCounterMode(display=False) as counter:
        linear_shared(x, values, scales, layouts)
    assert counter.get_total_flops() == 2 * 5 * 96 * sum(ROWS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear_shared(x, values, scales, layouts)[0].dtype == torch.bfloat16
    want = portable_linear_shared(x, values, flat, numbers, [], u, b, [])
    for got, other in zip(linear_shared(x, values, scales, layouts, (), u, b), want, strict=True):
        torch.testing.assert_close(got, other, rtol=1e-4, atol=1e-4)


def test_wrong_counts_are_named():
    values, scales, layouts = weights()
    x = torch.randn(5, 96)
    with pytest.raises(RuntimeError, match="bias has 1 entries, wanted 0 or 3"):
        linear_shared(x, values, scales, layouts, [torch.zeros(48)])
    with pytest.raises(RuntimeError, match="layouts has 15 entries, wanted 5 for each of the 2 weights"):
        linear_shared(x, values[:2], scales, layouts)
    with pytest.raises(RuntimeError, match="weight 0 has 96"):
        linear_shared(x[:, :95], values, scales, layouts)
