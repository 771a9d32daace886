"""rms_norm_gated: transformers' modules, its gradients against float64, one graph."""

import pytest
import torch
from torch.library import opcheck
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridRMSNormGated
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from monograph.ops.rms_norm_gated import (
    portable_rms_norm_gated,
    portable_rms_norm_gated_backward,
    rms_norm_gated,
)

per_isa = pytest.mark.per_isa
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Half a unit in the last place, and what float32 sums of a few hundred terms add.
ROUND = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}
QWEN = {"gate": "silu", "round_before_weight": True}
KIMI = {"gate": "sigmoid", "round_before_weight": False}
KINDS = pytest.mark.parametrize("kind", [QWEN, KIMI], ids=["qwen", "kimi"])


def tensors(dtype, shape=(3, 7, 200), weight_dtype=None):
    torch.manual_seed(0)
    x, z = (2 * torch.randn(shape)).to(dtype), (2 * torch.randn(shape)).to(dtype)
    return x, z, (1 + 0.3 * torch.randn(shape[-1])).to(weight_dtype or dtype)


def exact(x, z, weight, kind, eps=1e-6):
    n = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    act = torch.nn.functional.silu(z) if kind["gate"] == "silu" else torch.sigmoid(z)
    return n * (1.0 if weight is None else weight) * act


@per_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (Qwen3NextRMSNormGated, QWEN),
        (Qwen3_5RMSNormGated, QWEN),
        (OlmoHybridRMSNormGated, QWEN),
        (KimiLinearRMSNormGated, KIMI),
    ],
)
def test_the_values_of_transformers_modules(dtype, module, kind):
    """They differ in the order of the sum of squares and by two units of float32 in the activation.

    That moves a result to its neighbour where it lies next to the middle of two: for bf16 (fp16) a unit of
    float32 does in 2^-15 (2^-12) of the elements, there are three roundings and some four units.
    """
    x, z, weight = tensors(dtype, (64, 128))
    layer = module(128)
    layer.weight.data = weight
    want, got = layer(x, z), rms_norm_gated(x, z, weight, eps=layer.variance_epsilon, **kind)
    assert got.dtype == want.dtype == dtype
    share = {torch.bfloat16: 2**-11, torch.float16: 2**-8, torch.float32: 1.0}[dtype]
    assert (got != want).double().mean() <= share
    units = 8 if dtype == torch.float32 else 3
    assert torch.all((got - want).abs() <= units * torch.finfo(dtype).eps * want.abs() + 2**-24)


@pytest.mark.parametrize(
    ("x_dtype", "weight_dtype"), [(torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)]
)
def test_a_weight_of_another_dtype(x_dtype, weight_dtype):
    """The product with it is not rounded then: torch promotes it to float32."""
    x, z, weight = tensors(x_dtype, (64, 128), weight_dtype)
    layer = Qwen3NextRMSNormGated(128)
    layer.weight.data = weight
    want, got = layer(x, z), rms_norm_gated(x, z, weight)
    assert got.dtype == want.dtype == x_dtype
    assert (got != want).double().mean() <= 2**-8


@per_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_weight", [True, False])
@KINDS
def test_gradients_against_float64(dtype, with_weight, kind):
    x, z, weight = tensors(dtype)
    given = [x, z, weight] if with_weight else [x, z]
    leaves = [t.detach().requires_grad_() for t in given]
    wide = [t.detach().double().requires_grad_() for t in given]
    y = rms_norm_gated(*leaves, **kind)
    want_y = exact(wide[0], wide[1], wide[2] if with_weight else None, kind)
    dy = torch.randn(x.shape).to(dtype)
    got = torch.autograd.grad(y, leaves, dy)
    want = torch.autograd.grad(want_y, wide, dy.double())
    assert torch.all((y - want_y).abs() <= 3.1 * ROUND[dtype] * want_y.abs() + 2**-20 * want_y.abs().max())
    for one, other, leaf in zip(got, want, leaves, strict=True):
        assert one.dtype == leaf.dtype
        roundings = 3.1 if leaf is leaves[1] else 1.01  # dz holds m as it was rounded
        limit = roundings * ROUND[dtype] * other.abs() + 2**-19 * other.abs().max()
        if with_weight and leaf is leaves[2]:  # each term holds x k as it was rounded
            terms = (dy.double() * exact(wide[0], wide[1], None, kind)).abs().reshape(-1, 200).sum(0)
            limit = limit + ROUND[dtype] * terms
        assert torch.all((one - other).abs() <= limit)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@KINDS
def test_portable(dtype, kind):
    x, z, weight = tensors(dtype)
    options = (weight, 1e-6, 0 if kind is QWEN else 1, kind["round_before_weight"])
    one, other = torch.ops.monograph.rms_norm_gated(x, z, *options), portable_rms_norm_gated(x, z, *options)
    assert (one - other).abs().max() <= 2 * ROUND[dtype] * other.abs().max()
    sample = (torch.randn_like(x), x, z, *options)
    ours = torch.ops.monograph.rms_norm_gated_backward(*sample)
    for one, other in zip(ours, portable_rms_norm_gated_backward(*sample), strict=True):
        assert one.dtype == other.dtype
        assert (one - other).abs().max() <= 2 * ROUND[dtype] * other.abs().max()


@pytest.mark.parametrize("gate", [0, 1])
def test_the_portable_gradient(gate):
    leaves = [t.requires_grad_() for t in tensors(torch.float64, (4, 5))]
    y = portable_rms_norm_gated(*leaves, 1e-6, gate, True)
    dy = torch.randn_like(y)
    want = torch.autograd.grad(y, leaves, dy)
    with torch.no_grad():
        got = portable_rms_norm_gated_backward(dy, *leaves, 1e-6, gate, True)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(got, want, strict=True))
    assert torch.autograd.gradcheck(lambda *t: portable_rms_norm_gated(*t, 1e-6, gate, True), leaves)


@per_isa
def test_same_bits_for_threads_neighbours_and_strides():
    x, z, weight = tensors(torch.bfloat16, (400, 128))
    dy = torch.randn_like(x)

    def run(rows=slice(None)):
        leaves = [t.detach()[rows].requires_grad_() for t in (x, z)] + [weight.detach().requires_grad_()]
        y = rms_norm_gated(*leaves)
        return (y, *torch.autograd.grad(y, leaves, dy[rows]))

    threads, one = torch.get_num_threads(), run()
    try:
        torch.set_num_threads(2)
        assert all(torch.equal(a, b) for a, b in zip(run(), one, strict=True))
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(run(slice(37, 38))[:3], one[:3], strict=True):
        assert torch.equal(a, b[37:38])
    wide = torch.randn(400, 3, 130).bfloat16()  # z beside others, as a fused projection leaves it
    part = wide[:, 1, 1:129]
    assert torch.equal(rms_norm_gated(x, part, weight), rms_norm_gated(x, part.clone(), weight))
    turned = wide.transpose(0, 2)
    assert torch.equal(rms_norm_gated(turned, turned), rms_norm_gated(turned.clone(), turned.clone()))


def test_empty_rows_and_columns():
    for shape in ((0, 8), (3, 0), (2, 0, 8)):
        x, z, weight = torch.randn(shape), torch.randn(shape), torch.ones(shape[-1])
        leaves = [t.requires_grad_() for t in (x, z, weight)]
        y = rms_norm_gated(*leaves)
        dx, dz, dweight = torch.autograd.grad(y, leaves, torch.ones_like(y))
        assert y.shape == dx.shape == dz.shape == x.shape
        assert torch.equal(dweight, torch.zeros(shape[-1]))


@KINDS
def test_opcheck(kind):
    x, z, weight = (t.requires_grad_() for t in tensors(torch.float32, (3, 40)))
    options = (1e-6, 0 if kind is QWEN else 1, kind["round_before_weight"])
    for w in (weight, None, weight.detach().bfloat16()):
        opcheck(torch.ops.monograph.rms_norm_gated.default, (x, z, w, *options))
    sample = (torch.randn(3, 40), x.detach(), z.detach(), weight.detach(), *options)
    opcheck(torch.ops.monograph.rms_norm_gated_backward.default, sample)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_over_lengths(backend):
    torch._dynamo.reset()
    _, _, weight = tensors(torch.bfloat16, (1, 96))
    weight.requires_grad_()

    def step(x, z):
        return rms_norm_gated(x * 2, z, weight) * 0.5

    graph = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
    for number, tokens in enumerate((3, 17, 40)):
        x, z = (torch.randn(2, tokens, 96).bfloat16().requires_grad_() for _ in range(2))
        found = []
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            for function in (graph, step):
                y = function(x, z)
                found.append((y, *torch.autograd.grad(y, [x, z, weight], torch.ones_like(y))))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_nothing_is_saved_but_the_inputs():
    leaves = [t.requires_grad_() for t in tensors(torch.bfloat16)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        rms_norm_gated(*leaves)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in leaves}


def test_autocast_takes_the_wider_dtype():
    x, z, weight = tensors(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = rms_norm_gated(x, z.float(), weight)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, rms_norm_gated(x.float(), z.float(), weight).bfloat16())


def test_misuse_is_named():
    x, z, weight = tensors(torch.bfloat16)
    for arguments, message in (
        ((x, z, weight[1:]), "weight has 199 columns, wanted 200"),
        ((x, z.float(), weight), "z is float32, wanted bfloat16 as the activations"),
        ((x, z[1:], weight), "z has 14 rows, wanted 21"),
        ((x.double(), z, weight), "x has dtype float64, wanted bfloat16"),
    ):
        with pytest.raises(RuntimeError, match=f"rms_norm_gated: {message}"):
            rms_norm_gated(*arguments)
    with pytest.raises(RuntimeError, match="rms_norm_gated: eps is -1, wanted 0 or more"):
        rms_norm_gated(x, z, weight, eps=-1.0)
    with pytest.raises(RuntimeError, match=r"rms_norm_gated: gate is 2, wanted 0 \(silu\) or 1 \(sigmoid\)"):
        torch.ops.monograph.rms_norm_gated(x, z, weight, 1e-6, 2, True)
    with pytest.raises(ValueError, match="gate is 'tanh', wanted one of silu, sigmoid"):
        rms_norm_gated(x, z, weight, gate="tanh")
    x.requires_grad_()
    (dx,) = torch.autograd.grad(rms_norm_gated(x, z, weight).float().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="rms_norm_gated_backward is a gradient and cannot be diff"):
        dx.sum().backward()
