"""gram: a chain of float32 over the rows, by numpy's exact doubles; slices, strides, gradients, one graph."""

import numpy as np
import pytest
import torch
from torch.library import opcheck

import monograph as mg
from monograph.ops.gram import gram, portable_gram
from monograph.ops.linear import linear, plain_linear

pytestmark = pytest.mark.per_isa

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def factors(dtype, *shape, m=5, n=70):
    torch.manual_seed(0)
    return torch.randn(*shape, m).to(dtype), torch.randn(*shape, n).to(dtype)


def chain(left, right):
    """Sixteen-bit products are exact in float32, so that a fused multiply-add is an addition."""
    sums = np.zeros((left.shape[1], right.shape[1]), np.float32)
    for a, b in zip(left.float().numpy(), right.float().numpy(), strict=True):
        sums += a[:, None] * b[None, :]
    return torch.from_numpy(sums)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(("m", "n"), [(5, 70), (70, 5), (16, 33), (8, 8), (1, 1)])
def test_one_chain_in_the_order_of_the_rows(dtype, m, n):
    left, right = factors(dtype, 150, m=m, n=n)
    want = chain(left, right)
    for out in DTYPES:
        got = gram(left, right, dtype=out)
        assert got.dtype == out
        assert torch.equal(got, want.to(out))


def test_float32_against_float64():
    left, right = factors(torch.float32, 300)
    size = left.double().abs().t() @ right.double().abs()
    assert torch.all((gram(left, right) - left.double().t() @ right.double()).abs() <= 300 * 2**-24 * size)


@pytest.mark.parametrize("cut", [1, 31, 32, 64, 99])
def test_slices_of_the_rows_change_no_bit(cut):
    left, right = factors(torch.bfloat16, 100)
    first = gram(left[:cut], right[:cut])
    assert torch.equal(gram(left[cut:], right[cut:], first), gram(left, right))
    rounded = gram(left[cut:], right[cut:], first, dtype=torch.bfloat16)
    assert torch.equal(rounded, gram(left, right, dtype=torch.bfloat16))


def test_rows_at_strides_leading_dimensions_and_threads():
    left, right = factors(torch.bfloat16, 3, 40, n=200)
    want = gram(left.reshape(-1, 5), right.reshape(-1, 200))
    assert torch.equal(gram(left, right), want)
    apart = torch.randn(3, 40, 500).bfloat16()
    apart[..., 100:300] = right
    assert torch.equal(gram(left, apart[..., 100:300]), want)
    turned = right.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(gram(left, turned), want)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(gram(left, right), want)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (4,)])
@pytest.mark.parametrize(("m", "n"), [(0, 4), (4, 0), (2, 3)])
def test_nothing_to_add(shape, m, n):
    left, right = factors(torch.bfloat16, *shape, m=m, n=n)
    before = torch.randn(m, n)
    for operator in (torch.ops.monograph.gram, portable_gram):
        got = operator(left, right, before, torch.float32)
        assert got.shape == (m, n)
        assert got.data_ptr() != before.data_ptr() or got.numel() == 0
        if left.shape[0] == 0:
            assert torch.equal(got, before)
            assert torch.equal(operator(left, right, None, torch.float16), torch.zeros(m, n).half())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_portable(dtype):
    left, right = factors(dtype, 60)
    before = torch.randn(5, 70)
    for out in DTYPES:
        for given in (None, before):
            got, other = gram(left, right, given, dtype=out), portable_gram(left, right, given, out)
            assert got.dtype == other.dtype
            assert (got.double() - other.double()).abs().max() <= 2 * torch.finfo(out).eps * 60 + 1e-4


def test_gradients_against_float64():
    left, right = factors(torch.float32, 2, 20)
    given = [left, right, torch.randn(5, 70)]
    above = torch.randn(5, 70)
    leaves = [t.requires_grad_() for t in given]
    wide = [t.detach().double().requires_grad_() for t in given]
    got = torch.autograd.grad(gram(*leaves), leaves, above)
    a, b, before = wide
    product = before + a.reshape(-1, 5).t() @ b.reshape(-1, 70)
    for one, other in zip(got, torch.autograd.grad(product, wide, above.double()), strict=True):
        assert one.dtype == torch.float32
        assert torch.allclose(one.double(), other, atol=1e-4)


def test_second_derivative_of_a_layer_goes_through_it():
    """d/dx of the norm of db, as gradient penalties have it."""
    torch.manual_seed(0)
    packed = mg.quantize(torch.randn(24, 64), "nf4")
    x, b = torch.randn(6, 64, requires_grad=True), torch.randn(24, 4, requires_grad=True)
    a, dy = torch.randn(4, 64), torch.randn(6, 24)

    y = linear(x, packed.values, list(packed.scales), packed.layout, None, plain_linear(x, a), b)
    (db,) = torch.autograd.grad(y, b, dy, create_graph=True)
    (got,) = torch.autograd.grad(db.square().sum(), x)
    wide = x.detach().double().requires_grad_()
    (want,) = torch.autograd.grad((dy.double().t() @ (wide @ a.double().t())).square().sum(), wide)
    assert torch.allclose(got.double(), want, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype):
    left, right = (t.requires_grad_() for t in factors(dtype, 9))
    opcheck(torch.ops.monograph.gram, (left, right, None, dtype))
    opcheck(torch.ops.monograph.gram, (left, right, torch.randn(5, 70), torch.float32))


def test_one_graph_with_any_number_of_rows():
    def step(left, right):
        return gram(left, right, dtype=torch.bfloat16).float().sum() + gram(left, right).square().sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (7, 12, 64):
        leaves = [t.requires_grad_() for t in factors(torch.bfloat16, rows)]
        got, want = (torch.autograd.grad(f(*leaves), leaves) for f in (compiled, step))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_misuse_is_named():
    left, right = factors(torch.bfloat16, 6)
    for arguments, words in (
        ((left, right[:5]), "gram: right has"),
        ((left, right.float()), "gram: right is"),
        ((left, right, torch.randn(5, 71)), "gram: sum has"),
        ((left, right, torch.randn(5, 70).half()), "gram: sum is"),
        ((torch.tensor(1.0), right), "gram: left has no dimensions"),
    ):
        for operator in (torch.ops.monograph.gram, portable_gram):
            given = arguments if len(arguments) == 3 else (*arguments, None)
            with pytest.raises((RuntimeError, ValueError), match=words):
                operator(*given, torch.float32)
    with pytest.raises(RuntimeError, match="gram: the output has dtype float64"):
        gram(left, right, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"gram: the output is torch\.int32"):
        portable_gram(left, right, None, torch.int32)
