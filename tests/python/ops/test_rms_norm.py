"""rms_norm: transformers' modules to the bit, its gradients against float64, one graph."""

import resource

import pytest
import torch
from torch.library import opcheck
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from monograph.ops.rms_norm import portable_rms_norm, portable_rms_norm_backward, rms_norm

pytestmark = pytest.mark.per_isa

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Half a unit in the last place, and what float32 sums of a few hundred terms add.
ROUND = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-21}
LLAMA = {"one_plus_weight": False, "round_before_weight": True}
GEMMA = {"one_plus_weight": True, "round_before_weight": False}
KINDS = pytest.mark.parametrize("kind", [LLAMA, GEMMA], ids=["llama", "gemma"])


def tensors(dtype, shape=(3, 7, 200), weight_dtype=None):
    torch.manual_seed(0)
    x, residual = (2 * torch.randn(shape)).to(dtype), torch.randn(shape).to(dtype)
    return x, (0.3 * torch.randn(shape[-1])).to(weight_dtype or dtype), residual


def exact(x, weight, residual, kind, eps=1e-6):
    """float64; the sum is rounded as the residual stream is."""
    s = x.double() if residual is None else x.double() + residual.double()
    n = s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + eps)
    return n * (weight.double() + (1 if kind["one_plus_weight"] else 0)), s


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [128, 200, 1024])
def test_the_values_of_transformers_modules(dtype, width):
    """Only the order of the sum of squares differs: one unit of float32 in 1 / rms.

    That moves a result to its neighbour where it lies next to the middle of two: for bf16 (fp16) in 2^-15
    (2^-12) of the elements a unit, and there are two roundings.
    """
    x, weight, _ = tensors(dtype, (64, width))
    share = {torch.bfloat16: 2**-12, torch.float16: 2**-9, torch.float32: 1.0}[dtype]
    for module, kind in ((LlamaRMSNorm(width), LLAMA), (Gemma3RMSNorm(width), GEMMA)):
        module.weight.data = weight
        want, (got, _) = module(x), rms_norm(x, weight, **kind)
        assert got.dtype == want.dtype == dtype
        differs = got != want
        assert differs.double().mean() <= share
        # Two roundings, the neighbour after each; of 1 / rms itself in float32.
        assert torch.all(
            (got - want).abs() <= (4 if dtype == torch.float32 else 2) * torch.finfo(dtype).eps * want.abs()
        )


@pytest.mark.parametrize(
    ("x_dtype", "weight_dtype"), [(torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)]
)
@KINDS
def test_a_weight_of_another_dtype(x_dtype, weight_dtype, kind):
    """Llama's module promotes to float32 then, as torch's product does; Gemma's keeps the dtype of x."""
    x, weight, _ = tensors(x_dtype, weight_dtype=weight_dtype)
    module = (LlamaRMSNorm if kind is LLAMA else Gemma3RMSNorm)(x.shape[-1])
    module.weight.data = weight
    y, _ = rms_norm(x, weight, **kind)
    want = module(x)
    assert y.dtype == want.dtype
    assert (y - want).abs().max() <= ROUND[x_dtype] * want.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@KINDS
def test_the_sum_is_the_residual_stream(dtype, kind):
    x, weight, residual = tensors(dtype)
    y, s = rms_norm(x, weight, residual, **kind)
    assert torch.equal(s, residual + x)
    assert torch.equal(y, rms_norm(s, weight, **kind)[0])
    assert rms_norm(x, weight, **kind)[1] is x
    assert torch.equal(rms_norm(x, None, **kind)[0], rms_norm(x, torch.ones(200, dtype=dtype), **LLAMA)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_residual", [False, True])
@KINDS
def test_gradients_against_float64(dtype, with_residual, kind):
    x, weight, residual = tensors(dtype)
    if with_residual:  # whose sum needs no rounding: float64 has the same s
        residual = (residual * 4).round() / 4
        x = (x * 4).round() / 4
    given = [x, weight, residual] if with_residual else [x, weight]
    leaves = [t.detach().requires_grad_() for t in given]
    wide = [t.detach().double().requires_grad_() for t in given]
    y, s = rms_norm(leaves[0], leaves[1], leaves[2] if with_residual else None, **kind)
    want_y, want_s = exact(wide[0], wide[1], wide[2] if with_residual else None, kind)
    dy, ds = torch.randn(x.shape).to(dtype), torch.randn(x.shape).to(dtype)
    outs, wants, grads = ([y, s], [want_y, want_s], [dy, ds]) if with_residual else ([y], [want_y], [dy])
    got = torch.autograd.grad(outs, leaves, grads)
    want = torch.autograd.grad(wants, wide, [g.double() for g in grads])
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # of the subnormals
    assert torch.all((y - want_y).abs() <= 2.1 * ROUND[dtype] * want_y.abs() + least)
    for one, other, leaf in zip(got, want, leaves, strict=True):
        assert one.dtype == leaf.dtype
        limit = ROUND[dtype] * other.abs() + 2**-20 * other.abs().max()
        if leaf is leaves[1]:  # each term holds s k as it was rounded
            n, _ = exact(wide[0], torch.ones(200), wide[2] if with_residual else None, LLAMA)
            limit = limit + ROUND[dtype] * (dy.double() * n).abs().reshape(-1, 200).sum(0)
        assert torch.all((one - other).abs() <= limit)
    if with_residual:
        assert torch.equal(got[0], got[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@KINDS
def test_portable(dtype, kind):
    x, weight, residual = tensors(dtype)
    options = (1e-6, kind["one_plus_weight"], kind["round_before_weight"])
    ours = torch.ops.monograph.rms_norm(x, weight, residual, *options)
    for one, other in zip(ours, portable_rms_norm(x, weight, residual, *options), strict=True):
        assert (one - other).abs().max() <= 2 * ROUND[dtype] * other.abs().max()
    sample = (torch.randn_like(x), residual, x, weight, *options, True)
    ours = torch.ops.monograph.rms_norm_backward(*sample)
    for one, other in zip(ours, portable_rms_norm_backward(*sample), strict=True):
        assert one.dtype == other.dtype
        assert (one - other).abs().max() <= 2 * ROUND[dtype] * other.abs().max()


def test_same_bits_for_threads_neighbours_and_strides():
    x, weight, residual = tensors(torch.bfloat16, (400, 384))
    dy = torch.randn_like(x)

    def run(rows=slice(None)):
        leaves = [t.detach()[rows].requires_grad_() for t in (x, residual)] + [
            weight.detach().requires_grad_()
        ]
        y, s = rms_norm(leaves[0], leaves[2], leaves[1])
        return (y, s, *torch.autograd.grad([y, s], leaves, [dy[rows], dy[rows]]))

    threads, one = torch.get_num_threads(), run()
    try:
        torch.set_num_threads(2)
        assert all(torch.equal(a, b) for a, b in zip(run(), one, strict=True))
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(run(slice(37, 38))[:4], one[:4], strict=True):
        assert torch.equal(a, b[37:38])
    wide = torch.randn(400, 1000).bfloat16()
    assert torch.equal(rms_norm(wide[:, 5:389], weight)[0], rms_norm(wide[:, 5:389].clone(), weight)[0])
    assert torch.equal(rms_norm(wide.t(), None)[0], rms_norm(wide.t().contiguous(), None)[0])


def test_no_rows_of_any_width_take_no_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert rms_norm(torch.empty(0, 2**28))[0].shape == (0, 2**28)
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18
    )  # in KiB; a gain would be 1 GiB


def test_empty_rows_and_columns():
    for shape in ((0, 8), (3, 0), (2, 0, 8)):
        x = torch.randn(shape, requires_grad=True)
        weight = torch.ones(shape[-1], requires_grad=True)
        y, s = rms_norm(x, weight, x.detach())
        dx, dweight = torch.autograd.grad([y, s], [x, weight], [torch.ones_like(y)] * 2)
        assert y.shape == s.shape == dx.shape == x.shape
        assert torch.equal(dweight, torch.zeros(shape[-1]))


@KINDS
def test_opcheck(kind):
    x, weight, residual = (t.requires_grad_() for t in tensors(torch.float32, (3, 40)))
    options = (1e-6, kind["one_plus_weight"], kind["round_before_weight"])
    for sample in ((x, weight, residual), (x, None, None), (x, weight.detach().bfloat16(), None)):
        opcheck(torch.ops.monograph.rms_norm.default, (*sample, *options))
    sample = (torch.randn(3, 40), None, x.detach(), weight.detach(), *options, True)
    opcheck(torch.ops.monograph.rms_norm_backward.default, sample)


def test_one_graph_over_lengths():
    torch._dynamo.reset()
    _, weight, _ = tensors(torch.bfloat16, (1, 96))
    weight.requires_grad_()
    graph = torch.compile(rms_norm, backend="aot_eager", fullgraph=True, dynamic=True)
    for number, tokens in enumerate((3, 17, 40)):
        x, residual = (torch.randn(2, tokens, 96).bfloat16().requires_grad_() for _ in range(2))
        found = []
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            for function in (graph, rms_norm):
                y, s = function(x, weight, residual)
                found.append((y, s, *torch.autograd.grad([y, s], [x, weight, residual], [y, s])))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_nothing_is_saved_but_the_sum_and_the_weight():
    x, weight, residual = (t.requires_grad_() for t in tensors(torch.bfloat16))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        _, s = rms_norm(x, weight, residual)
    assert {t.data_ptr() for t in saved} == {s.data_ptr(), weight.data_ptr()}


def test_autocast_takes_the_wider_dtype():
    """As x + residual does."""
    x, weight, residual = tensors(torch.bfloat16)
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.float16):
        y, s = rms_norm(leaf, weight, residual.float())
        alone, _ = rms_norm(x, weight)
    want = rms_norm(x.float(), weight, residual.float())
    assert s.dtype == torch.float32
    assert torch.equal(s, want[1])
    assert torch.equal(y, want[0])
    assert torch.equal(alone, rms_norm(x, weight)[0])
    (dx,) = torch.autograd.grad(y.sum(), leaf)
    assert dx.dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="float64"), torch.autocast("cpu", dtype=torch.bfloat16):
        rms_norm(x, weight, residual.double())


def test_misuse_is_named():
    x, weight, residual = tensors(torch.bfloat16)
    with pytest.raises(RuntimeError, match="rms_norm: weight has 199 columns, wanted 200"):
        rms_norm(x, weight[1:])
    with pytest.raises(
        RuntimeError, match="rms_norm: residual is float32, wanted bfloat16 as the activations"
    ):
        rms_norm(x, weight, residual.float())
    with pytest.raises(
        RuntimeError, match="rms_norm: residual has 2 dimensions, wanted the shape of the activations"
    ):
        rms_norm(x, weight, residual.flatten(0, 1))
    with pytest.raises(RuntimeError, match="rms_norm: eps is -1, wanted 0 or more"):
        rms_norm(x, weight, eps=-1.0)
    with pytest.raises(RuntimeError, match="rms_norm: x has dtype float64, wanted bfloat16"):
        rms_norm(x.double(), weight)
    x.requires_grad_()
    y, _ = rms_norm(x, weight)
    (dx,) = torch.autograd.grad(y.float().pow(2).sum(), x, create_graph=True)
    with pytest.raises(
        RuntimeError, match="rms_norm_backward is a gradient and cannot be differentiated again"
    ):
        dx.sum().backward()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_weight_of_another_shape_is_refused_on_every_device(device):
    """A trace took it, and autograd met a gradient of another shape than its weight's."""
    x = torch.ones(3, 33, device=device)
    with pytest.raises((ValueError, RuntimeError), match=r"rms_norm: weight has .*wanted"):
        rms_norm(x, torch.ones(3, 33, device=device))
