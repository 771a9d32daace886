"""causal_conv1d: torch's convolution document by document in float64, its gradients, one graph."""

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, causal_conv1d_update

from monograph.ops.causal_conv1d import (
    causal_conv1d,
    portable_causal_conv1d,
    portable_causal_conv1d_backward,
)

per_isa = pytest.mark.per_isa

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Half a unit in the last place, and what sums of a few float32 terms add.
ROUND = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}
BOUNDARIES = [2, 2, 5, 6, 78, 81, 81]  # a gap at both ends; empty, shorter than the taps, longer than a tile
TOKENS = 84


def tensors(dtype, channels=40, taps=4, turned=False, weight_dtype=None):
    torch.manual_seed(0)
    x = torch.randn(channels, TOKENS).to(dtype).t() if turned else torch.randn(TOKENS, channels).to(dtype)
    weight = (0.5 * torch.randn(channels, taps)).to(weight_dtype or dtype)
    bias = torch.randn(channels).to(weight_dtype or dtype)
    state = torch.randn(len(BOUNDARIES) - 1, channels, taps - 1).to(dtype)
    return x, weight, bias, torch.tensor(BOUNDARIES, dtype=torch.int32), state


def exact(x, weight, bias, cu, state, silu):
    """torch's own convolution of each document behind its state."""
    rows, finals, taps = [x[: cu[0]] * 0], [], weight.shape[1]
    for n, (begin, end) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
        past = x.new_zeros(x.shape[1], taps - 1) if state is None else state[n]
        whole = torch.cat((past, x[begin:end].t()), 1)
        finals.append(whole[:, whole.shape[1] - taps + 1 :])
        if begin < end:
            y = F.conv1d(whole[None], weight[:, None], bias, groups=x.shape[1])[0].t()
            rows.append(F.silu(y) if silu else y)
    return torch.cat([*rows, x[cu[-1] :] * 0]), torch.stack(finals)


@per_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "turned"])
@pytest.mark.parametrize(
    ("silu", "with_bias", "with_state"), [(True, False, False), (False, True, True), (True, True, True)]
)
def test_values_and_gradients_against_float64(dtype, turned, silu, with_bias, with_state):
    given = tensors(dtype, turned=turned, weight_dtype=torch.float32 if with_state else None)
    cu = given[3]
    keep = [True, True, with_bias, False, with_state]
    used = [t if k or t is cu else None for t, k in zip(given, keep, strict=True)]
    leaves = [t.detach().requires_grad_() for t, k in zip(used, keep, strict=True) if k]
    wide = [t.detach().double().requires_grad_() for t, k in zip(used, keep, strict=True) if k]

    def arguments(parts):
        parts = iter(parts)
        return [next(parts) if k else (cu if t is cu else None) for t, k in zip(used, keep, strict=True)]

    y, final = causal_conv1d(*arguments(leaves), silu=silu, keep_state=True)
    want_y, want_final = exact(*arguments(wide), silu)
    assert y.dtype == final.dtype == dtype
    assert y.is_contiguous()
    assert torch.equal(final, want_final.to(dtype))
    assert torch.all((y - want_y).abs() <= ROUND[dtype] * want_y.abs() + 2**-20 * want_y.abs().max())
    dy, dfinal = torch.randn(y.shape).to(dtype), torch.randn(final.shape).to(dtype)
    got = torch.autograd.grad([y, final], leaves, [dy, dfinal])
    want = torch.autograd.grad([want_y, want_final], wide, [dy.double(), dfinal.double()])
    for one, other, leaf in zip(got, want, leaves, strict=True):
        assert one.dtype == leaf.dtype
        limit = ROUND[leaf.dtype] * other.abs() + 2**-18 * other.abs().max()
        assert torch.all((one - other).abs() <= limit)


@per_isa
@pytest.mark.parametrize("taps", [1, 2, 8])
def test_other_numbers_of_taps(taps):
    x, weight, bias, cu, state = tensors(torch.float32, 7, taps)
    y, final = causal_conv1d(x, weight, bias, cu, state, keep_state=True)
    want, want_final = exact(x.double(), weight.double(), bias.double(), cu, state.double(), True)
    assert torch.all((y - want).abs() <= 2**-20 * want.abs().max())
    assert torch.equal(final, want_final.float())
    assert causal_conv1d(x, weight, bias, cu, state)[1].shape == (0, 7, taps - 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_functions_of_transformers(dtype):
    """Of one document; a step of generation. In bf16 theirs rounds before the activation too."""
    x, weight, bias, _, _ = tensors(dtype)
    limit = 2 * ROUND[dtype]
    cu = torch.tensor([0, TOKENS], dtype=torch.int32)
    want = causal_conv1d_fn(x.t()[None], weight, bias, "silu")[0].t()
    y, final = causal_conv1d(x, weight, bias, cu, keep_state=True)
    assert torch.all((y - want).abs() <= limit * want.abs().max())
    cache, token = x.t()[None, :, -4:].contiguous(), torch.randn(1, 40, 1).to(dtype)
    want = causal_conv1d_update(token, cache, weight, bias, "silu")[0].t()
    y, final = causal_conv1d(token[0].t(), weight, bias, cu[:2].clamp(max=1), final, keep_state=True)
    assert torch.all((y - want).abs() <= limit * want.abs().max())
    assert torch.equal(final, cache[:, :, 1:])


@per_isa
def test_a_document_knows_neither_neighbours_nor_place_nor_threads():
    x, weight, bias, cu, state = tensors(torch.bfloat16, 600)
    dy = torch.randn_like(x)

    def run(x, dy, cu, state):
        leaf, past = x.detach().requires_grad_(), state.detach().requires_grad_()
        y, final = causal_conv1d(leaf, weight, bias, cu, past, keep_state=True)
        return (y, *torch.autograd.grad([y, final], [leaf, past], [dy, torch.ones_like(final)]), final)

    one = run(x, dy, cu, state)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert all(torch.equal(a, b) for a, b in zip(run(x, dy, cu, state), one, strict=True))
    finally:
        torch.set_num_threads(threads)
    alone = run(x[6:78], dy[6:78], torch.tensor([0, 72], dtype=torch.int32), state[3:4])
    for a, b, part in zip(alone, one, (slice(6, 78), slice(6, 78), slice(3, 4), slice(3, 4)), strict=True):
        assert torch.equal(a, b[part])
    spoiled, spoiled_dy = x.clone(), dy.clone()
    spoiled[:6] = spoiled[78:] = float("nan")
    spoiled_dy[:6] = spoiled_dy[78:] = float("nan")
    for a, b in zip(run(spoiled, spoiled_dy, cu, state)[:2], one[:2], strict=True):
        assert torch.equal(a[6:78], b[6:78])
        assert not a[:2].any()
        assert not a[81:].any()


def test_sums_over_tokens_do_not_depend_on_threads():
    x, weight, bias = torch.randn(2000, 70), torch.randn(70, 4), torch.randn(70)
    cu = torch.tensor([0, 700, 1999], dtype=torch.int32)
    sample = (torch.randn(2000, 70), None, x, weight, bias, cu, None, True, [False, True, True, False])
    threads, one = torch.get_num_threads(), torch.ops.monograph.causal_conv1d_backward(*sample)
    try:
        torch.set_num_threads(2)
        two = torch.ops.monograph.causal_conv1d_backward(*sample)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert (one[0].numel(), one[3].numel()) == (0, 0)


@pytest.mark.parametrize("silu", [True, False])
def test_the_portable_gradient(silu):
    x, weight, bias, cu, state = tensors(torch.float64, 3, 3)
    leaves = [t.requires_grad_() for t in (x, weight, bias, state)]
    y, final = portable_causal_conv1d(x, weight, bias, cu, state, silu, True)
    dy, dfinal = torch.randn_like(y), torch.randn_like(final)
    want = torch.autograd.grad([y, final], leaves, [dy, dfinal])
    with torch.no_grad():
        got = portable_causal_conv1d_backward(dy, dfinal, x, weight, bias, cu, state, silu, [True] * 4)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(got, want, strict=True))

    def function(*parts):
        return portable_causal_conv1d(*parts[:3], cu, parts[3], silu, True)

    assert torch.autograd.gradcheck(function, leaves)


def test_opcheck():
    x, weight, bias, cu, state = tensors(torch.float32, 5)
    leaves = [t.requires_grad_() for t in (x, weight, bias, state)]
    op = torch.ops.monograph.causal_conv1d.default
    for keep in (True, False):
        opcheck(op, (*leaves[:3], cu, leaves[3], True, keep))
    turned = torch.randn(5, TOKENS).t()
    opcheck(op, (turned, weight.detach(), None, cu, None, False, True))
    x, weight, bias, state = (t.detach() for t in leaves)
    sample = (torch.randn_like(x), torch.randn_like(state), x, weight, bias, cu, state, True)
    for need in ([True] * 4, [True, False, False, False]):
        opcheck(torch.ops.monograph.causal_conv1d_backward.default, (*sample, need))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_over_packings(backend):
    torch._dynamo.reset()
    _, weight, bias, _, _ = tensors(torch.bfloat16, 24)
    weight.requires_grad_()
    bias.requires_grad_()

    def step(x, cu):
        y, _ = causal_conv1d(x * 2, weight, bias, cu)
        return y * 0.5

    graph = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
    for number, tokens in enumerate((30, 84, 111)):
        x = torch.randn(tokens, 24).bfloat16().requires_grad_()
        cu = torch.tensor([0, 3 + number, 20, tokens - 1, tokens], dtype=torch.int32)
        found = []
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            for function in (graph, step):
                y = function(x, cu)
                found.append((y, *torch.autograd.grad(y, [x, weight, bias], torch.ones_like(y))))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_nothing_is_saved_but_the_inputs():
    x, weight, bias, cu, state = tensors(torch.bfloat16)
    leaves = [t.requires_grad_() for t in (x, weight, bias, state)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        causal_conv1d(x, weight, bias, cu, state)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in (*leaves, cu)}


def test_autocast_flops_and_empty_rows():
    x, weight, bias, cu, state = tensors(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, final = causal_conv1d(x, weight, bias, cu, state, keep_state=True)
    want = causal_conv1d(x.bfloat16(), weight, bias, cu, state.bfloat16(), keep_state=True)
    assert torch.equal(y, want[0])
    assert torch.equal(final, want[1])
    with FlopCounterMode(display=False) as counter:
        causal_conv1d(x, weight, bias, cu)
    assert counter.get_total_flops() == 2 * TOKENS * 40 * 4
    none = torch.zeros(3, dtype=torch.int32)
    y, final = causal_conv1d(x[:0], weight, bias, none, state[:2], keep_state=True)
    assert y.shape == (0, 40)
    assert torch.equal(final, state[:2])


def test_misuse_is_named():
    x, weight, bias, cu, state = tensors(torch.bfloat16)
    for arguments, message in (
        ((x[None], weight, bias, cu), "x has 3 dimensions, wanted \\[tokens, channels\\]"),
        ((x, torch.randn(40, 9), bias, cu), "weight has 9 taps, wanted 1 to 8"),
        ((x, weight[1:], bias, cu), "weight has 39 channels, x has 40"),
        ((x, weight.half(), bias, cu), "weight is float16, wanted bfloat16 as x, or float32"),
        ((x, weight, bias[1:], cu), "bias has 39 elements in 1 dimensions, wanted \\[40\\]"),
        ((x, weight, bias, cu.long()), "cu has dtype int64, wanted int32"),
        ((x, weight, bias, cu.flip(0)), "cu\\[1\\] is 81|cu\\[2\\] is 78, below the one before it"),
        ((x, weight, bias, cu + 5), "cu ends at 86, there are 84 tokens"),
        ((x, weight, bias, cu, state[1:]), "state has the wrong shape, wanted \\[6, 40, 3\\]"),
        ((x.double(), weight, bias, cu), "x has dtype float64, wanted bfloat16"),
    ):
        with pytest.raises(RuntimeError, match=f"causal_conv1d: {message}"):
            causal_conv1d(*arguments)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(causal_conv1d(x, weight, bias, cu)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="causal_conv1d_backward is a gradient and cannot be diff"):
        dx.sum().backward()
