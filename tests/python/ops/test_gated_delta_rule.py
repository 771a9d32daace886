"""gated_delta_rule against a token recurrence in float64 and transformers' two implementations."""

from itertools import pairwise

import pytest
import torch
import torch._dynamo
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from monograph.ops.gated_delta_rule import (
    gated_delta_rule,
    portable_gated_delta_rule,
    portable_gated_delta_rule_backward,
)
from support.delta_rule_inputs import CU, KINDS, NAMES, drawn, far, offsets, portable


def recurrence(q, k, v, g, beta, cu, state=None, scale=None, l2norm=True):
    """A token at a time in float64; differentiable."""
    q, k, v, g, beta = (t.double() for t in (q, k, v, g, beta))
    group = v.shape[1] // q.shape[1]
    if l2norm:
        q, k = (t / torch.sqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    q, k = (t.repeat_interleave(group, 1) for t in (q, k))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rows, finals = [torch.zeros_like(v[0])] * v.shape[0], []
    for n, (begin, end) in enumerate(pairwise(cu.tolist())):
        s = q.new_zeros(v.shape[1], q.shape[2], v.shape[2]) if state is None else state[n].double()
        for t in range(begin, end):
            s = s * g[t].exp()[:, None, None]
            read = torch.einsum("hk,hkv->hv", k[t], s)
            s = s + k[t][:, :, None] * (beta[t][:, None] * (v[t] - read))[:, None, :]
            rows[t] = scale * torch.einsum("hk,hkv->hv", q[t], s)
        finals.append(s)
    return torch.stack(rows), torch.stack(finals)


both = pytest.mark.parametrize("rule", [gated_delta_rule, portable])


def gradients(function, tensors, *rest, douts=None):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out, final = function(*leaves, *rest)
    generator = torch.Generator().manual_seed(7)
    given = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in (out, final)]
    total = sum((t * d).sum() for t, d in zip((out, final), given, strict=True))
    return torch.autograd.grad(total, leaves)


@both
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_against_float64(kind, rule):
    """In float32 within a few units of its last place times the length of a sum; in bf16 twice the error of
    the output's rounding.

    Strong decay leaves g a gradient of 1e-7 of the others': its bound is wider.
    """
    tensors, cu = drawn(kind), offsets()
    state = torch.randn(5, 4, 16, 24, generator=torch.Generator().manual_seed(3))
    got = rule(*tensors, cu, state, keep_state=True)
    want = recurrence(*tensors, cu, state)
    assert max(far(a, b) for a, b in zip(got, want, strict=True)) < 1e-5
    assert not got[0][:2].any()

    def ours(*leaves):
        return rule(*leaves[:5], cu, leaves[5], keep_state=True)

    mine = gradients(ours, [*tensors, state])
    theirs64 = gradients(lambda *leaves: recurrence(*leaves[:5], cu, leaves[5]), [*tensors, state])
    errors = [far(a, b) for a, b in zip(mine, theirs64, strict=True)]
    assert max(errors[:3] + errors[4:]) < 2e-5, errors
    assert errors[3] < 1e-3, errors
    short = [t.to(torch.bfloat16) if i != 3 else t for i, t in enumerate(tensors)]
    exact = recurrence(*short, cu)[0]
    assert far(rule(*short, cu)[0], exact) < 2 * far(exact.to(torch.bfloat16), exact) + 1e-5


def test_no_further_from_float64_than_transformers():
    """Length 1000, alone, the error of transformers' chunked and recurrent code beside ours."""
    for kind in KINDS:
        tensors = drawn(kind, 1000, (2, 2), (16, 16))
        want = recurrence(*tensors, offsets([0, 1000]))[0]
        got = far(gated_delta_rule(*tensors, offsets([0, 1000]))[0], want)
        batch = [t[None] for t in tensors]
        for function in (theirs.torch_recurrent_gated_delta_rule, theirs.torch_chunk_gated_delta_rule):
            peer = function(*batch, use_qk_l2norm_in_kernel=True)[0][0]
            assert far(peer, want) < 1e-5
        assert got <= 2 * far(peer, want) + 1e-7, kind  # of the second: sums by chunks


def test_gradcheck_of_the_portable_form():
    q, k, v, g, beta = (t.double().requires_grad_() for t in drawn("mixed", 70, (1, 2), (2, 3)))
    state = torch.randn(2, 2, 2, 3, dtype=torch.float64).requires_grad_()
    cu = offsets([0, 3, 69])

    def run(*leaves):
        return portable(*leaves[:5], cu, leaves[5], scale=0.7, keep_state=True)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert torch.autograd.gradcheck(run, (q, k, v, g, beta, state), fast_mode=True)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_document_alone_has_the_bits_of_a_packed_one(dtype, rule):
    tensors, cu = drawn("mixed", dtype=dtype), offsets()
    state = torch.randn(5, 4, 16, 24)

    def run(leaves, cu, state):
        return rule(*leaves, cu, state, keep_state=True)

    def results(tensors, cu, state, dout, dfinal):
        leaves = [t.detach().clone().requires_grad_() for t in (*tensors, state)]
        outputs = run(leaves[:5], cu, leaves[5])
        return *outputs, *torch.autograd.grad(outputs, leaves, (dout, dfinal))

    dout, dfinal = torch.randn(150, 4, 24).to(dtype), torch.randn(5, 4, 16, 24)
    out, final, *grads, dstate = results(tensors, cu, state, dout, dfinal)
    for n, (begin, end) in enumerate(pairwise(CU)):
        here, own = slice(begin, end), [t[begin:end].contiguous() for t in (*tensors, dout)]
        one, last, *parts, first = results(
            own[:5], offsets([0, end - begin]), state[n, None], own[5], dfinal[n, None]
        )
        assert torch.equal(one, out[here])
        assert torch.equal(last[0], final[n])
        assert torch.equal(first[0], dstate[n])
        assert all(torch.equal(a, b[here]) for a, b in zip(parts, grads, strict=True))
    assert torch.equal(final[1], state[1])  # of an empty document
    assert all(not t[:2].any() for t in grads)


@both
def test_a_nan_stays_in_its_document(rule):
    cu = offsets([0, 40, 90, 140])
    clean, dout = drawn("plain"), torch.ones(150, 4, 24)
    inside = torch.ones(150, dtype=torch.bool)
    inside[40:90] = False

    def run(tensors):
        leaves = [t.clone().requires_grad_() for t in tensors]
        out, final = rule(*leaves, cu, keep_state=True)
        return out[inside], final[::2], *(t[inside] for t in torch.autograd.grad(out, leaves, dout)), out

    *want, _ = run(clean)
    for i in range(5):
        tensors = [t.clone() for t in clean]
        for row in (60, 145):  # in the second document, and in none
            tensors[i][row] = float("nan")
        *got, out = run(tensors)
        assert out[60:90].isnan().any()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_grouped_heads_are_those_repeated_and_strides_do_not_matter():
    q, k, v, g, beta = drawn("mixed")
    cu = offsets()
    out, _ = gated_delta_rule(q, k, v, g, beta, cu)
    repeated = [t.repeat_interleave(2, 1) for t in (q, k)]
    assert torch.allclose(out, gated_delta_rule(*repeated, v, g, beta, cu)[0], rtol=0, atol=1e-6)
    mixed = torch.cat([t.flatten(1) for t in (q, k, v)], 1)  # as the convolution leaves them
    parts = [
        t.unflatten(1, (-1, size)) for t, size in zip(mixed.split((32, 32, 96), 1), (16, 16, 24), strict=True)
    ]
    assert not parts[2].is_contiguous()
    assert torch.equal(gated_delta_rule(*parts, g, beta, cu)[0], out)


def test_a_state_carries_a_document_on():
    tensors = drawn("plain")
    whole, final = gated_delta_rule(*tensors, offsets([0, 150]), keep_state=True)
    first, state = gated_delta_rule(*(t[:100] for t in tensors), offsets([0, 100]), keep_state=True)
    second, last = gated_delta_rule(*(t[100:] for t in tensors), offsets([0, 50]), state, keep_state=True)
    assert far(torch.cat((first, second)), whole) < 1e-6
    assert far(last, final) < 1e-6
    one, _ = gated_delta_rule(*(t[100:101] for t in tensors), offsets([0, 1]), state)
    assert far(one[0], whole[100]) < 1e-6
    assert gated_delta_rule(*tensors, offsets())[1].shape == (0, 4, 16, 24)


def test_the_gradient_of_g_is_in_its_own_dtype():
    for g_dtype in (torch.float32, torch.bfloat16):
        tensors = drawn("mixed", dtype=torch.bfloat16, g_dtype=g_dtype)
        found = gradients(lambda *leaves: gated_delta_rule(*leaves, offsets(), keep_state=True), tensors)
        assert [t.dtype for t in found] == [t.dtype for t in tensors]
        want = gradients(lambda *leaves: recurrence(*leaves, offsets()), tensors)
        assert far(found[3], want[3]) < 1e-2


def test_any_sign_of_the_scale_is_taken_by_both_implementations():
    """Against the recurrence in float64; numbers that float32 does not hold are refused by both alike."""
    tensors, cu = drawn(tokens=20), offsets([0, 7, 20])
    want = recurrence(*tensors, cu, scale=-1.0)[0]
    portable = torch.ops.monograph.gated_delta_rule.default._op_dk
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    for scale in (-1.0, float("nan"), float("-inf"), -1e-60):
        arguments = (*tensors, cu, None, scale, True, True)
        for run in (torch.ops.monograph.gated_delta_rule, lambda *a: portable(key, *a)):
            if scale == -1.0:
                got = run(*arguments)[0]
                assert (got - want).abs().max() <= 1e-5 * want.abs().max()
            else:
                with pytest.raises((RuntimeError, ValueError), match=f"scale is {scale}, wanted a number in"):
                    run(*arguments)


def test_a_second_derivative_is_refused_by_name():
    tensors = [t.requires_grad_() for t in drawn("plain", 8)]
    out, _ = gated_delta_rule(*tensors, offsets([0, 8]))
    (dq,) = torch.autograd.grad(out.sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="gated_delta_rule_backward is a gradient and cannot be"):
        torch.autograd.grad(dq.sum(), tensors[1])


@pytest.mark.parametrize("with_state", [False, True])
def test_opcheck(with_state):
    state = torch.randn(5, 4, 16, 24).requires_grad_() if with_state else None
    for dtype, g_dtype in ((torch.float32,) * 2, (torch.bfloat16, torch.float32), (torch.bfloat16,) * 2):
        tensors = [t.requires_grad_() for t in drawn("plain", dtype=dtype, g_dtype=g_dtype)]
        tensors[2] = torch.cat((tensors[2], tensors[2]), 2).detach()[:, :, :24].requires_grad_()  # strided
        arguments = (*tensors, offsets(), state, 0.25, True, with_state)
        torch.library.opcheck(torch.ops.monograph.gated_delta_rule.default, arguments)


def test_one_graph_for_all_lengths_and_the_gradients_of_eager_mode():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def run(*leaves):
        out, _ = gated_delta_rule(*leaves)
        return out, out.new_zeros(0)

    compiled = torch.compile(run, backend=counter, fullgraph=True, dynamic=True)
    for tokens, boundaries in ((150, CU), (70, [0, 30, 31, 70, 70, 70]), (90, [0, 90, 90, 90, 90, 90])):
        tensors = drawn("mixed", tokens)
        results = []
        for function in (run, compiled):
            leaves = [t.clone().requires_grad_() for t in tensors]
            out, _ = function(*leaves, offsets(boundaries))
            results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert counter.frame_count == 1


def test_wrong_arguments_are_named():
    tensors, cu = drawn("plain", 10), offsets([0, 10])
    wrong = {
        "g": tensors[3].double(),
        "beta": tensors[4][:, :2],
        "k": tensors[1][:5],
        "v": tensors[2][:, :3],
    }
    for name, value in wrong.items():
        given = [value if n == name else t for n, t in zip(NAMES, tensors, strict=True)]
        for function in (torch.ops.monograph.gated_delta_rule, portable_gated_delta_rule):
            with pytest.raises(Exception, match=rf"gated_delta_rule: ({name}|\d value heads)"):
                function(*given, cu, None, 0.25, True, False)
    state, dout = torch.zeros(1, 4, 16, 24, dtype=torch.bfloat16), torch.zeros(10, 4, 8)
    with pytest.raises(ValueError, match="state is bfloat16, wanted float32"):
        portable_gated_delta_rule(*tensors, cu, state, 0.25, True, False)
    with pytest.raises(ValueError, match=r"dout has shape \[10, 4, 8\], wanted \[10, 4, 24\]"):
        portable_gated_delta_rule_backward(dout, None, *tensors, cu, None, 0.25, True)


def test_flops():
    tensors = [t.requires_grad_() for t in drawn("plain", 10)]
    with FlopCounterMode(display=False) as counter:
        gated_delta_rule(*tensors, offsets([0, 10]))[0].sum().backward()
    assert counter.get_total_flops() == (6 + 16) * 10 * 4 * 16 * 24
