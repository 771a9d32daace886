"""rotary: transformers' apply_rotary_pos_emb to the bit, norms of heads, gradients in float64, one graph."""

import pytest
import torch
from torch.library import opcheck
from transformers.models.cohere import modeling_cohere
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from monograph.ops.rms_norm import rms_norm
from monograph.ops.rotary import portable_rotary, portable_rotary_backward, rotary

pytestmark = pytest.mark.per_isa

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROUND = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}


def tensors(dtype, batch=2, tokens=9, heads=(4, 2), size=64, rotated=64, one_row=False, interleaved=False):
    torch.manual_seed(0)
    q, k = (torch.randn(batch, tokens, h, size).to(dtype) for h in heads)
    places = torch.arange(tokens)[None] + 100 * torch.arange(1 if one_row else batch)[:, None]
    angles = places[..., None] * 10000.0 ** (-torch.arange(rotated // 2) / (rotated // 2))
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    weights = [(1 + 0.2 * torch.randn(size)).to(dtype) for _ in range(2)]
    return q, k, angles.cos().to(dtype), angles.sin().to(dtype), *weights


def exact(q, k, cos, sin, weights, interleaved):
    """float64 on complex numbers: nothing in common with the kernel's pairs of roundings."""
    outs, rotated = [], cos.shape[-1]
    for x, weight in zip((q, k), weights, strict=True):
        if weight is not None:
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
        head = x[..., :rotated]
        if interleaved:
            pairs, c, s = head.unflatten(-1, (-1, 2)), cos[..., ::2], sin[..., ::2]
            number = torch.complex(pairs[..., 0], pairs[..., 1])
        else:
            number = torch.complex(*head.chunk(2, -1))
            c, s = cos[..., : rotated // 2], sin[..., : rotated // 2]
        number = number * torch.complex(c, s)[:, :, None]
        parts = (number.real, number.imag)
        y = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
        outs.append(torch.cat((y, x[..., rotated:]), -1))
    return outs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("one_row", [False, True])
def test_the_bits_of_transformers(dtype, one_row):
    q, k, cos, sin, *_ = tensors(dtype, one_row=one_row)
    want = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    for a, b in zip(rotary(q, k, cos, sin), want, strict=True):
        assert torch.equal(a, b)


def test_the_bits_of_transformers_interleaved():
    """Cohere computes in float32, whatever comes in."""
    q, k, cos, sin, *_ = tensors(torch.float32, interleaved=True)
    want = modeling_cohere.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    for a, b in zip(rotary(q, k, cos, sin, interleaved=True), want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_with_the_norm_of_heads(dtype):
    """The bits of rms_norm and then rotary; of transformers' modules but for neighbours in the norm."""
    q, k, cos, sin, *weights = tensors(dtype)
    got = rotary(q, k, cos, sin, *weights)
    normed = [rms_norm(x, w)[0] for x, w in zip((q, k), weights, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(got, rotary(*normed, cos, sin), strict=True))
    for x, w, i in ((q, weights[0], 0), (k, weights[1], 1)):
        module = LlamaRMSNorm(64)
        module.weight.data = w
        eager = modeling_llama.apply_rotary_pos_emb(module(x), module(x), cos, sin, unsqueeze_dim=2)[0]
        assert (got[i] - eager).abs().max() <= 4 * ROUND[dtype] * eager.abs().max()
        if dtype != torch.float32:
            assert (got[i] != eager).double().mean() <= 0.01


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("rotated", [64, 22])
def test_gradients_against_float64(dtype, interleaved, norm, rotated):
    q, k, cos, sin, *weights = tensors(dtype, rotated=rotated, interleaved=interleaved)
    given = [q, k, *weights] if norm else [q, k]
    leaves, wide = [t.requires_grad_() for t in given], [t.detach().double().requires_grad_() for t in given]
    ours = rotary(*leaves[:2], cos, sin, *leaves[2:], interleaved=interleaved)
    pair = wide[2:] if norm else [None, None]
    want = exact(*wide[:2], cos.double(), sin.double(), pair, interleaved)
    dys = [torch.randn(t.shape).to(dtype) for t in ours]
    got = torch.autograd.grad(ours, leaves, dys)
    wanted = torch.autograd.grad(want, wide, [d.double() for d in dys])
    for one, other in zip((*ours, *got), (*want, *wanted), strict=True):
        assert one.dtype == dtype
        # Angles of two elements of a pair are equal; the sums of weights have tokens x heads terms.
        limit = 4 * ROUND[dtype] * other.abs().max()
        assert torch.all((one - other).abs() <= limit)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_portable(dtype, interleaved):
    q, k, cos, sin, *weights = tensors(dtype, rotated=32)
    options = (1e-6, False, True, interleaved)
    sample = (q, k, cos, sin, *weights, *options)
    back = (torch.randn_like(q), torch.randn_like(k), *sample, True)
    for operator, portable, given in (
        (torch.ops.monograph.rotary, portable_rotary, sample),
        (torch.ops.monograph.rotary_backward, portable_rotary_backward, back),
    ):
        for a, b in zip(operator(*given), portable(*given), strict=True):
            assert a.dtype == b.dtype
            assert (a - b).abs().max() <= 2 * ROUND[dtype] * b.abs().max()


def test_same_bits_for_threads_neighbours_and_strides():
    q, k, cos, sin, *weights = tensors(torch.bfloat16, tokens=200)

    def run(rows=slice(None), change=lambda t: t):
        leaves = [change(t.detach()[:, rows]).requires_grad_() for t in (q, k)]
        norms = [w.detach().requires_grad_() for w in weights]
        outs = rotary(*leaves, cos[:, rows], sin[:, rows], *norms)
        return (*outs, *torch.autograd.grad(outs, leaves + norms, [t.detach() for t in outs]))

    one, threads = run(), torch.get_num_threads()
    wide = lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]]  # noqa: E731
    heads_first = lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)  # noqa: E731
    for change in (wide, heads_first):
        assert all(torch.equal(a, b) for a, b in zip(run(change=change), one, strict=True))
    try:
        torch.set_num_threads(2)
        assert all(torch.equal(a, b) for a, b in zip(run(), one, strict=True))
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(run(slice(7, 8))[:4], one[:4], strict=True):
        assert torch.equal(a, b[:, 7:8])


@pytest.mark.parametrize("norm", [False, True])
def test_opcheck(norm):
    q, k, cos, sin, *weights = tensors(torch.float32, size=16, rotated=16)
    for t in (q, k, *weights):
        t.requires_grad_()
    options = (1e-6, False, True, False)
    pair = weights if norm else [None, None]
    opcheck(torch.ops.monograph.rotary.default, (q, k, cos, sin, *pair, *options))
    plain = [t.detach() for t in (q, k, q, k)]
    pair = [None if w is None else w.detach() for w in pair]
    opcheck(torch.ops.monograph.rotary_backward.default, (*plain, cos, sin, *pair, *options, norm))


def test_one_graph_over_lengths():
    torch._dynamo.reset()
    *_, q_weight, k_weight = tensors(torch.bfloat16)
    graph = torch.compile(rotary, backend="aot_eager", fullgraph=True, dynamic=True)
    for number, tokens in enumerate((3, 17, 40)):
        q, k, cos, sin, *_ = tensors(torch.bfloat16, tokens=tokens)
        leaves = [t.requires_grad_() for t in (q, k, q_weight, k_weight)]
        found = []
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            for function in (graph, rotary):
                outs = function(q, k, cos, sin, q_weight, k_weight)
                found.append((*outs, *torch.autograd.grad(outs, leaves, outs)))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_saved_tensors():
    q, k, cos, sin, *_ = tensors(torch.bfloat16)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        rotary(q.requires_grad_(), k.requires_grad_(), cos, sin)
    assert {t.data_ptr() for t in saved} == {cos.data_ptr(), sin.data_ptr()}


def _portable(q, k, cos, sin):
    return portable_rotary(q, k, cos, sin, None, None, 1e-6, False, True, False)


def test_autocast_takes_the_widest_dtype():
    """As torch's own elementwise operations do, gradients included."""
    q, k, cos, sin, *weights = tensors(torch.bfloat16)
    leaf = q.clone().requires_grad_()
    for wide, others in (("cos", (cos.float(), sin)), ("none", (cos, sin))):
        with torch.autocast("cpu", dtype=torch.float16):
            got = rotary(leaf, k, *others)
        dtype = torch.float32 if wide == "cos" else torch.bfloat16
        want = rotary(q.to(dtype), k.to(dtype), cos.to(dtype), sin.to(dtype))
        assert all(a.dtype == dtype and torch.equal(a, b) for a, b in zip(got, want, strict=True))
        (dq,) = torch.autograd.grad(got[0].float().sum(), leaf)
        assert dq.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = rotary(q, k, cos, sin, *(w.float() for w in weights))
    assert got[0].dtype == torch.float32


def test_misuse_is_named():
    q, k, cos, sin, weight, _ = tensors(torch.bfloat16)
    with pytest.raises(RuntimeError, match="rotary: cos is float32, wanted bfloat16 as q"):
        rotary(q, k, cos.float(), sin)
    with pytest.raises(
        RuntimeError, match=r"rotary: cos has 3 dimensions and 512 elements, wanted \[2 or 1, 9"
    ):
        rotary(q, k, cos[:, 1:, :32], sin)
    for op, error in ((rotary, RuntimeError), (_portable, ValueError)):
        with pytest.raises(error, match="rotary: q has heads of 32, wanted the 64 columns of cos or more"):
            op(q[..., :32], k, cos, sin)
        with pytest.raises(error, match="rotary: q has heads of 2048, wanted 1024 at most"):
            op(q.repeat(1, 1, 1, 32), k, cos.repeat(1, 1, 32), sin.repeat(1, 1, 32))
    with pytest.raises(RuntimeError, match="rotary: the weight of q is float32, wanted bfloat16 as q"):
        rotary(q, k, cos, sin, weight.float())
    with pytest.raises(ValueError, match="rotary: cos requires a gradient, wanted a constant"):
        rotary(q, k, cos.requires_grad_(), sin)
