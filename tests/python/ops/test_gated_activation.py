"""silu_mul and gelu_mul: transformers' modules, gradients in float64, halves of one tensor, one graph."""

import pytest
import torch
from torch.library import opcheck
from transformers.activations import ACT2FN

from monograph.ops import gated_activation
from monograph.ops.gated_activation import gelu_mul, silu_mul

pytestmark = pytest.mark.per_isa

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROUND = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-21}
CASES = {
    "silu": (silu_mul, "silu_mul", ()),
    "gelu_pytorch_tanh": (lambda gate, up: gelu_mul(gate, up, tanh=True), "gelu_mul", (True,)),
    "gelu": (lambda gate, up: gelu_mul(gate, up, tanh=False), "gelu_mul", (False,)),
}
NAMES = pytest.mark.parametrize("name", list(CASES))


def tensors(dtype, shape=(3, 7, 200)):
    torch.manual_seed(0)
    return [(scale * torch.randn(shape)).to(dtype) for scale in (3.0, 1.0, 1.0)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@NAMES
def test_the_values_of_transformers_modules(dtype, name):
    """Both err by 2^-22 |gate| at most; torch's gelu loses the digits of 1 + tanh or 1 + erf below -2."""
    gate, up, _ = tensors(dtype, (64, 512))
    got, want = CASES[name][0](gate, up), ACT2FN[name](gate) * up
    assert got.dtype == dtype
    if dtype != torch.float32:
        near = gate > -2
        assert (got != want)[near].double().mean() <= (0.002 if name == "silu" else 0.01)
    limit = 2 * torch.finfo(dtype).eps * want.double().abs() + 2**-21 * (gate * up).double().abs()
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert torch.all((got.double() - want.double()).abs() <= limit + 2 * least)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@NAMES
def test_gradients_against_float64(dtype, name):
    given = tensors(dtype)
    leaves = [t.requires_grad_() for t in given[:2]]
    wide = [t.detach().double().requires_grad_() for t in given[:2]]
    y, want_y = CASES[name][0](*leaves), ACT2FN[name](wide[0]) * wide[1]
    got = torch.autograd.grad(y, leaves, given[2])
    want = torch.autograd.grad(want_y, wide, given[2].double())
    for one, other, roundings in zip((y, *got), (want_y, *want), (2.1, 1.1, 2.1), strict=True):
        assert one.dtype == dtype
        assert torch.all((one - other).abs() <= roundings * ROUND[dtype] * other.abs() + 2**-19)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@NAMES
def test_portable(dtype, name):
    gate, up, dy = tensors(dtype)
    _, operator, options = CASES[name]
    for suffix, sample in (("", (gate, up, *options)), ("_backward", (dy, gate, up, *options))):
        ours = getattr(torch.ops.monograph, operator + suffix)(*sample)
        other = getattr(gated_activation, f"portable_{operator}{suffix}")(*sample)
        pairs = [(ours, other)] if suffix == "" else zip(ours, other, strict=True)
        for a, b in pairs:
            assert (a - b).abs().max() <= 2 * ROUND[dtype] * b.abs().max()


@NAMES
def test_same_bits_for_halves_and_threads(name):
    function = CASES[name][0]
    both = torch.randn(2, 300, 2 * 176).bfloat16().requires_grad_()
    dy = torch.randn(2, 300, 176).bfloat16()

    def run(gate, up):
        y = function(gate, up)
        return (y, *torch.autograd.grad(y, [gate, up], dy))

    halves, threads = both.chunk(2, dim=-1), torch.get_num_threads()
    one = run(*halves)
    assert all(torch.equal(a, b) for a, b in zip(run(*(t.contiguous() for t in halves)), one, strict=True))
    try:
        torch.set_num_threads(2)
        assert all(torch.equal(a, b) for a, b in zip(run(*halves), one, strict=True))
    finally:
        torch.set_num_threads(threads)
    alone = function(*(t[1:, 7:8] for t in halves))
    assert torch.equal(alone, one[0][1:, 7:8])


def test_values_that_are_not_finite():
    gate = torch.tensor([float("inf"), float("nan"), -1e30, 1e30, 0.0, -0.0])
    for function, _, _ in CASES.values():
        leaf = gate.clone().requires_grad_()
        y = function(leaf, torch.ones(6))
        (slope,) = torch.autograd.grad(y, leaf, torch.ones(6))
        assert torch.equal(y[[0, 2, 3, 4, 5]], torch.tensor([float("inf"), -0.0, 1e30, 0.0, -0.0]))
        assert y[1].isnan()
        assert slope[1].isnan()
        assert torch.equal(slope[[0, 2, 3, 4, 5]], torch.tensor([1.0, 0.0, 1.0, 0.5, 0.5]))


def test_minus_infinity():
    """Where torch's formulas say infinity times 0, ours do; gelu by erf gives its limit."""
    gate = torch.tensor([float("-inf"), 1.0])
    assert silu_mul(gate, torch.ones(2))[0].isnan()
    assert gelu_mul(gate, torch.ones(2), tanh=True)[0].isnan()
    assert gelu_mul(gate, torch.ones(2), tanh=False)[0] == 0


@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0)])
def test_nothing_to_do(shape):
    gate, up = (torch.randn(shape, requires_grad=True) for _ in range(2))
    for function, _, _ in CASES.values():
        y = function(gate, up)
        assert y.shape == gate.shape
        assert all(g.shape == gate.shape for g in torch.autograd.grad(y.sum(), [gate, up]))


@NAMES
def test_opcheck(name):
    gate, up, dy = (t.requires_grad_() for t in tensors(torch.float32, (3, 40)))
    _, operator, options = CASES[name]
    opcheck(getattr(torch.ops.monograph, operator).default, (gate, up, *options))
    sample = [t.detach() for t in (dy, gate, up)]
    opcheck(getattr(torch.ops.monograph, f"{operator}_backward").default, (*sample, *options))


@NAMES
def test_one_graph_over_lengths(name):
    torch._dynamo.reset()
    function = CASES[name][0]
    graph = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for number, tokens in enumerate((3, 17, 40)):
        gate, up = (torch.randn(2, tokens, 96).bfloat16().requires_grad_() for _ in range(2))
        found = []
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            for f in (graph, function):
                y = f(gate, up)
                found.append((y, *torch.autograd.grad(y, [gate, up], y)))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_nothing_is_saved_but_the_inputs():
    gate, up, _ = (t.requires_grad_() for t in tensors(torch.bfloat16))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        silu_mul(gate, up)
    assert {t.data_ptr() for t in saved} == {gate.data_ptr(), up.data_ptr()}


@NAMES
def test_autocast_takes_the_wider_dtype(name):
    """As f(gate) * up does; dtypes that are one stay."""
    gate, up, _ = tensors(torch.bfloat16)
    leaf, function = gate.clone().requires_grad_(), CASES[name][0]
    with torch.autocast("cpu", dtype=torch.float16):
        y, plain = function(leaf, up.float()), function(gate, up)
    assert torch.equal(y, function(gate.float(), up.float()))
    assert torch.equal(plain, function(gate, up))
    (dgate,) = torch.autograd.grad(y.sum(), leaf)
    assert dgate.dtype == torch.bfloat16


def test_misuse_is_named():
    gate, up, _ = tensors(torch.bfloat16)
    with pytest.raises(RuntimeError, match="silu_mul: up has 199 columns, wanted 200"):
        silu_mul(gate, up[..., 1:])
    with pytest.raises(RuntimeError, match="gelu_mul: up is float32, wanted bfloat16 as the activations"):
        gelu_mul(gate, up.float(), tanh=True)
    with pytest.raises(RuntimeError, match="silu_mul: gate has dtype float64, wanted bfloat16"):
        silu_mul(gate.double(), up)
    gate.requires_grad_()
    (dgate,) = torch.autograd.grad(silu_mul(gate, up).sum(), gate, create_graph=True)
    with pytest.raises(
        RuntimeError, match="silu_mul_backward is a gradient and cannot be differentiated again"
    ):
        dgate.sum().backward()
