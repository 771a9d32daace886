"""linear and linear_dx: accuracy against float64, the same bits in every batch, gradients, misuse."""

import pytest
import torch
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import monograph as mg
from monograph.ops.linear import linear, linear_dx, portable_linear, portable_linear_dx

pytestmark = pytest.mark.per_isa  # run once for each MONOGRAPH_ISA

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def packed(rows, cols, name="nf4", block=64, double_quant=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return mg.quantize(
        torch.randn(rows, cols, generator=generator) * 0.1, name, block_size=block, double_quant=double_quant
    )


def random_case(generator):
    """Shapes that reach tails of every tile: M, N and K anything, blocks that straddle rows, odd K."""

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    def upto(n):
        return int(torch.randint(1, n + 1, (1,), generator=generator))

    m = pick(1, 2, upto(16), upto(48))
    n = pick(1, upto(40), upto(80), 32, 64)
    k = pick(1, upto(70), upto(300), 64 * upto(6), 32 * upto(9))
    return m, n, k, pick("nf4", "fp4"), pick(32, 64, 128, 4096), pick(True, False)


def squared_errors(got, baseline, exact):
    scale = exact.norm() / max(exact.numel(), 1) ** 0.5 + 1e-30
    return (((got.double() - exact) / scale) ** 2).sum(), (((baseline.double() - exact) / scale) ** 2).sum()


@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_that_of_f_linear_over_2000_random_shapes(dtype):
    """Root of the mean squared error against float64, pooled over the shapes: at most 1.05 of F.linear's."""
    generator = torch.Generator().manual_seed(7)
    totals = torch.zeros(4, dtype=torch.float64)
    cases = [random_case(generator) for _ in range(700)]
    cases += [(3, 17, 4304, "nf4", 64, True), (5, 1, 4304, "fp4", 64, False), (2, 64, 1, "nf4", 32, True)]
    for i, (m, n, k, name, block, double) in enumerate(cases):
        w = packed(n, k, name, block, double, seed=i)
        x = torch.randn(m, k, generator=generator).to(dtype)
        dy = torch.randn(m, n, generator=generator).to(dtype)
        dense = w.dequantize(dtype)
        arguments = (w.values, list(w.scales), w.layout)
        forward = squared_errors(
            linear(x, *arguments), torch.nn.functional.linear(x, dense), x.double() @ dense.double().t()
        )
        dx = squared_errors(linear_dx(dy, *arguments), dy @ dense, dy.double() @ dense.double())
        totals += torch.stack([*forward, *dx])
    ours, plain, ours_dx, plain_dx = totals.sqrt().tolist()
    assert ours <= 1.05 * plain, (ours, plain)
    assert ours_dx <= 1.05 * plain_dx, (ours_dx, plain_dx)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(96, 4304), (130, 256), (33, 77)])
def test_a_row_has_the_same_bits_in_every_batch_and_for_any_threads(dtype, shape):
    rows, cols = shape
    w = packed(rows, cols)
    arguments = (w.values, list(w.scales), w.layout)
    torch.manual_seed(1)
    x, dy = torch.randn(513, cols).to(dtype), torch.randn(513, rows).to(dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        y, dx = linear(x, *arguments), linear_dx(dy, *arguments)
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            for m in (1, 2, 7, 16, 17, 64, 513):
                assert torch.equal(linear(x[:m], *arguments), y[:m]), (threads, m)
                assert torch.equal(linear_dx(dy[:m], *arguments), dx[:m]), (threads, m)
            # from the middle of the batch, at another address
            assert torch.equal(linear(x[100:103].clone(), *arguments), y[100:103])
            assert torch.equal(linear_dx(dy[100:103].clone(), *arguments), dx[100:103])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_low_rank_part_and_bias_ride_on_the_accumulators(dtype):
    w = packed(80, 192)
    arguments = (w.values, list(w.scales), w.layout)
    torch.manual_seed(2)
    for m, rank in ((1, 1), (5, 8), (33, 16), (17, 40)):
        x, u = torch.randn(m, 192).to(dtype), torch.randn(m, rank).to(dtype)
        b, a = torch.randn(80, rank).to(dtype), torch.randn(rank, 192).to(dtype)
        bias, dy = torch.randn(80).to(dtype), torch.randn(m, 80).to(dtype)
        dense = w.dequantize(dtype).double()
        exact = x.double() @ dense.t() + u.double() @ b.double().t() + bias.double()
        exact_dx = dy.double() @ dense + u.double() @ a.double()
        eps = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}[dtype]
        got = linear(x, *arguments, bias, u, b)
        torch.testing.assert_close(got.double(), exact, rtol=eps, atol=eps * exact.abs().mean().item())
        got = linear_dx(dy, *arguments, u, a)
        torch.testing.assert_close(got.double(), exact_dx, rtol=eps, atol=eps * exact_dx.abs().mean().item())


def test_empty_and_degenerate_shapes():
    for m, n, k in ((0, 8, 64), (3, 0, 64), (3, 8, 0), (0, 0, 0)):
        w = mg.quantize(torch.zeros(n, k))
        arguments = (w.values, list(w.scales), w.layout)
        y = linear(torch.randn(m, k), *arguments)
        assert y.shape == (m, n)
        assert not y.any()
        dx = linear_dx(torch.randn(m, n), *arguments)
        assert dx.shape == (m, k)
        assert not dx.any()


def test_an_expanded_dimension_is_repeated():
    weight = mg.quantize(torch.randn(8, 64))
    packed = (weight.values, list(weight.scales), weight.layout)
    rows = torch.randn(2, 1, 64)
    for x in (rows.expand(2, 3, 64), rows.transpose(0, 1).expand(3, 2, 64), rows[:1].expand(4, 5, 64)):
        assert torch.equal(linear(x, *packed), linear(x.contiguous(), *packed))


def test_leading_dimensions_and_strides_are_free():
    w = packed(48, 96)
    arguments = (w.values, list(w.scales), w.layout)
    x = torch.randn(2, 5, 96)
    want = linear(x.reshape(10, 96), *arguments)
    assert torch.equal(linear(x, *arguments), want.reshape(2, 5, 48))
    wide = torch.randn(10, 200)
    assert torch.equal(linear(wide[:, 3:99], *arguments), linear(wide[:, 3:99].contiguous(), *arguments))
    swapped = x.transpose(0, 1)
    assert torch.equal(linear(swapped, *arguments), linear(swapped.contiguous(), *arguments))


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_weights_run_on_the_same_kernels(dtype):
    torch.manual_seed(3)
    weight, x = torch.randn(40, 100).to(dtype), torch.randn(9, 100).to(dtype)
    got = linear(x, weight, [], [0, 0, 40, 100])
    exact = x.double() @ weight.double().t()
    baseline = torch.nn.functional.linear(x, weight)
    ours, plain = squared_errors(got, baseline, exact)
    assert ours <= 1.1 * plain + 1e-12


def float64_layer(x, dense, bias, u, b):
    y = x @ dense.t() + bias
    return y + u @ b.t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_against_float64(dtype, fused):
    """x, bias, u (or a, when u = x a^T), b: every gradient against autograd's own in float64."""
    w = packed(24, 96, double_quant=True)
    torch.manual_seed(4)
    leaves = {
        "x": torch.randn(7, 96),
        "bias": torch.randn(24),
        "b": torch.randn(24, 8),
        "a": torch.randn(8, 96) * 0.1,
        "u": torch.randn(7, 8),
    }
    leaves = {name: t.to(dtype).requires_grad_() for name, t in leaves.items()}
    dy = torch.randn(7, 24).to(dtype)
    x, bias, b, a, u = (leaves[n] for n in ("x", "bias", "b", "a", "u"))
    low = mg.ops.linear.plain_linear(x, a).detach() if fused else u
    y = linear(x, w.values, list(w.scales), w.layout, bias, low, b, a if fused else None)
    y.backward(dy)

    exact = {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
    low64 = exact["x"] @ exact["a"].t() if fused else exact["u"]
    dense = w.dequantize(dtype).double()
    float64_layer(exact["x"], dense, exact["bias"], low64, exact["b"]).backward(dy.double())
    eps = {torch.bfloat16: 2**-6, torch.float32: 2**-18}[dtype]
    for name in ("x", "bias", "b", "a" if fused else "u"):
        got, want = leaves[name].grad.double(), exact[name].grad
        assert (got - want).norm() <= eps * want.norm(), name
    if fused:
        assert leaves["u"].grad is None


def test_a_trainable_plain_weight_gets_its_gradient():
    torch.manual_seed(5)
    a, x = torch.randn(8, 96, requires_grad=True), torch.randn(5, 96, requires_grad=True)
    y = mg.ops.linear.plain_linear(x, a)
    y.sum().backward()
    want_a, want_x = torch.ones(5, 8).t() @ x.detach(), torch.ones(5, 8) @ a.detach()
    torch.testing.assert_close(a.grad, want_a)
    torch.testing.assert_close(x.grad, want_x)


def test_double_backward_through_dx():
    w = packed(24, 96)
    dy = torch.randn(3, 24, requires_grad=True)
    dx = linear_dx(dy, w.values, list(w.scales), w.layout)
    (grad,) = torch.autograd.grad(dx.sum(), dy)
    torch.testing.assert_close(grad, torch.ones(3, 96) @ w.dequantize(torch.float32).t())


def test_the_portable_implementation_agrees():
    torch.manual_seed(6)
    for dtype in DTYPES:
        w = packed(40, 96)
        x, dy = torch.randn(6, 96).to(dtype), torch.randn(6, 40).to(dtype)
        u, b, a = (torch.randn(s).to(dtype) for s in ((6, 4), (40, 4), (4, 96)))
        arguments = (w.values, list(w.scales), w.layout)
        eps = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 2**-18}[dtype]
        pairs = (
            (linear(x, *arguments, None, u, b), portable_linear(x, *arguments, None, u, b)),
            (linear_dx(dy, *arguments, u, a), portable_linear_dx(dy, *arguments, u, a)),
        )
        for got, want in pairs:
            assert (got.double() - want.double()).norm() <= eps * want.double().norm()


def test_nothing_of_weight_size_is_saved_for_backward():
    w = packed(256, 512)
    x = torch.randn(4, 512, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear(x, w.values, list(w.scales), w.layout)
    assert all(t.dtype == torch.uint8 for t in saved)  # the packed bytes; not even x


def test_flops_are_counted():
    w = packed(64, 128)
    with FlopCounterMode(display=False) as counter:
        linear(
            torch.randn(3, 128),
            w.values,
            list(w.scales),
            w.layout,
            None,
            torch.randn(3, 8),
            torch.randn(64, 8),
        )
        linear_dx(torch.randn(3, 64), w.values, list(w.scales), w.layout)
    assert counter.get_total_flops() == 2 * 3 * 64 * (128 + 8) + 2 * 3 * 64 * 128


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_chooses_the_type(dtype):
    w = packed(64, 128)
    x, bias = torch.randn(3, 128), torch.randn(64)
    with torch.autocast("cpu", dtype=dtype):
        y = linear(x, w.values, list(w.scales), w.layout, bias)
    assert y.dtype == dtype
    assert torch.equal(y, linear(x.to(dtype), w.values, list(w.scales), w.layout, bias.to(dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype):
    w = packed(24, 96)
    x = torch.randn(3, 96).to(dtype).requires_grad_()
    u, b, a = (torch.randn(s).to(dtype).requires_grad_() for s in ((3, 4), (24, 4), (4, 96)))
    bias = torch.randn(24).to(dtype)
    arguments = (w.values, list(w.scales), w.layout)
    ops = torch.ops.monograph
    opcheck(ops.linear, (x, *arguments, None, None, None, None))
    opcheck(ops.linear, (x, *arguments, bias, u, b, None))
    opcheck(ops.linear, (x, *arguments, None, u.detach(), b, a))
    dy = torch.randn(3, 24).to(dtype)
    opcheck(ops.linear_dx, (dy, *arguments, None, None))
    opcheck(ops.linear_dx, (dy, *arguments, u.detach(), a.detach()))


def test_wrong_arguments_name_the_thing_found_and_wanted():
    w = packed(24, 96)
    arguments = (w.values, list(w.scales), w.layout)
    x = torch.randn(3, 96)
    with pytest.raises(RuntimeError, match="x has 95 columns, the weight has 96"):
        linear(x[:, 1:], *arguments)
    with pytest.raises(RuntimeError, match="dy has 96 columns, the weight has 24 rows"):
        linear_dx(x, *arguments)
    with pytest.raises(RuntimeError, match="x has dtype float64"):
        linear(x.double(), *arguments)
    with pytest.raises(RuntimeError, match="bias is bfloat16, wanted float32"):
        linear(x, *arguments, torch.zeros(24, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="u and b must come together"):
        linear(x, *arguments, None, torch.zeros(3, 4))
    with pytest.raises(RuntimeError, match="u has 2 rows, wanted 3"):
        linear(x, *arguments, None, torch.zeros(2, 4), torch.zeros(24, 4))
    with pytest.raises(RuntimeError, match="wanted \\[24, 4\\]"):
        linear(x, *arguments, None, torch.zeros(3, 4), torch.zeros(24, 5))
    with pytest.raises(RuntimeError, match=r"layout has 3 entries, wanted \[format, block, rows, cols\]"):
        linear(x, w.values, list(w.scales), w.layout[:3])


def test_a_width_that_does_not_fit_is_named_while_tracing():
    """As the kernel names it: a graph of a layer whose weight became another shape says what is wrong."""
    weight = packed(48, 64)
    arguments = weight.values, weight.scales, weight.layout
    x, dy = torch.randn(3, 32), torch.randn(3, 64)
    for work, said in (
        (lambda: linear(x, *arguments), "x has 32 columns, the weight has 64"),
        (lambda: linear_dx(dy, *arguments), "dy has 64 columns, the weight has 48 rows"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=said):
            work()
        with pytest.raises(Exception, match=said):
            torch.compile(work, backend="eager", fullgraph=True)()
