"""varlen_attention against float64, against SDPA's own error, alone and packed, and as a graph node."""

import itertools
import math

import pytest
import torch
import torch._dynamo
from torch.library import opcheck

from monograph.ops.varlen_attention import (
    portable_varlen_attention,
    portable_varlen_attention_backward,
    varlen_attention,
)

pytestmark = pytest.mark.per_isa

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def random_case(generator):
    def pick(*choices):
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    def upto(n):
        return int(torch.randint(0, n + 1, (1,), generator=generator))

    lengths = [pick(0, 1, upto(20), upto(60)) for _ in range(1 + upto(4))]
    kv_heads = pick(1, 2, 3)
    return {
        "lengths": lengths,
        "tail": pick(0, 0, 3),
        "heads": kv_heads * pick(1, 2, 4),
        "kv_heads": kv_heads,
        "size": pick(8, 16, 64, 80),
        "value_size": pick(8, 16, 64),
        "causal": pick(True, True, False),
        "window": pick(0, 0, 1, 7, 33),
        "softcap": pick(0.0, 0.0, 15.0),
        "sinks": pick(False, True),
    }


def make(case, dtype, generator):
    total = sum(case["lengths"]) + case["tail"]
    offsets = torch.tensor([0, *torch.tensor(case["lengths"]).cumsum(0).tolist()], dtype=torch.int32)
    cu = torch.nn.functional.pad(offsets, (0, 2), value=int(offsets[-1]))
    q = torch.randn(total, case["heads"], case["size"], generator=generator).to(dtype)
    k = torch.randn(total, case["kv_heads"], case["size"], generator=generator).to(dtype)
    v = torch.randn(total, case["kv_heads"], case["value_size"], generator=generator).to(dtype)
    sinks = torch.randn(case["heads"], generator=generator) if case["sinks"] else None
    return q, k, v, cu, sinks


def run(q, k, v, cu, sinks, case, dout):
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    sink = None if sinks is None else sinks.clone().requires_grad_()
    out = varlen_attention(
        *leaves, cu, causal=case["causal"], window=case["window"], softcap=case["softcap"], sinks=sink
    )
    out.backward(dout)
    return [out.detach(), *(t.grad for t in leaves), None if sink is None else sink.grad]


def exact(q, k, v, cu, sinks, case, dout, kind=torch.float64):
    """Plain attention, one document and one head at a time, differentiated by autograd."""
    leaves = [t.detach().to(kind).requires_grad_() for t in (q, k, v)]
    sink = None if sinks is None else sinks.detach().to(kind).requires_grad_()
    pieces = []
    group = case["heads"] // case["kv_heads"]
    for begin, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        n = end - begin
        if n == 0:
            continue
        qd, kd, vd = (t[begin:end].transpose(0, 1) for t in leaves)
        kd, vd = kd.repeat_interleave(group, 0), vd.repeat_interleave(group, 0)
        scores = (qd @ kd.transpose(1, 2)) * case["size"] ** -0.5
        if case["softcap"]:
            scores = case["softcap"] * torch.tanh(scores / case["softcap"])
        distance = torch.arange(n)[:, None] - torch.arange(n)[None, :]
        hidden = distance < 0 if case["causal"] else torch.zeros(n, n, dtype=torch.bool)
        if case["window"]:
            hidden = hidden | (distance.abs() >= case["window"])
        scores = scores.masked_fill(hidden, -math.inf)
        if sink is not None:
            scores = torch.cat((scores, sink[:, None, None].expand(-1, n, 1)), dim=2)
        weights = torch.softmax(scores, dim=2)[..., :n].to(kind)
        pieces.append((weights @ vd).transpose(0, 1))
    rest = q.shape[0] - sum(p.shape[0] for p in pieces)
    out = torch.cat([*pieces, torch.zeros(rest, case["heads"], case["value_size"], dtype=kind)])
    if pieces:
        out.backward(dout.to(kind))
    grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]
    sink_grad = None if sink is None or not pieces else sink.grad
    return [out.detach(), *grads, sink_grad]


def error(got, want):
    return (got.double() - want.double()).abs().max().item() if want.numel() else 0.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_error_against_float64_over_random_packings(dtype):
    """Pooled over 350 packings a dtype: at most 2x (gradients 3x) the error of plain torch in that dtype."""
    generator = torch.Generator().manual_seed(11)
    ours, plain_errors = [0.0] * 5, [0.0] * 5
    for _ in range(350):
        case = random_case(generator)
        q, k, v, cu, sinks = make(case, dtype, generator)
        dout = torch.randn(q.shape[0], case["heads"], case["value_size"], generator=generator).to(dtype)
        if case["tail"]:
            dout[-case["tail"] :] = 0
        want = exact(q, k, v, cu, sinks, case, dout)
        got = run(q, k, v, cu, sinks, case, dout)
        plain = exact(q, k, v, cu, sinks, case, dout, kind=dtype)
        for i in range(5):
            if want[i] is None:
                continue
            ours[i] += error(got[i], want[i]) ** 2
            plain_errors[i] += error(plain[i], want[i]) ** 2
        if case["tail"]:
            assert not got[0][-case["tail"] :].any()
            assert not any(g[-case["tail"] :].any() for g in got[1:4])
    assert ours[0] ** 0.5 <= 2 * plain_errors[0] ** 0.5
    for i in range(1, 5):
        assert ours[i] ** 0.5 <= 3 * plain_errors[i] ** 0.5, i


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_document_has_the_same_bits_alone_and_packed_in_any_order(dtype):
    generator = torch.Generator().manual_seed(12)
    for _ in range(12):
        case = random_case(generator)
        case["lengths"] = [5, 70, 1, 33]
        case["tail"] = 0
        q, k, v, cu, sinks = make(case, dtype, generator)
        dout = torch.randn(q.shape[0], case["heads"], case["value_size"], generator=generator).to(dtype)
        together = run(q, k, v, cu, sinks, case, dout)
        starts = [0, 5, 75, 76, 109]
        documents = [slice(a, b) for a, b in itertools.pairwise(starts)]
        order = [2, 0, 3, 1]
        index = torch.cat([torch.arange(109)[documents[d]] for d in order])
        cu_other = torch.tensor([0, 1, 6, 39, 109], dtype=torch.int32)
        shuffled = run(q[index], k[index], v[index], cu_other, sinks, case, dout[index])
        for part, other in zip(together[:4], shuffled[:4], strict=True):
            assert torch.equal(part[index], other)
        for piece in documents:
            n = piece.stop - piece.start
            alone = run(
                q[piece],
                k[piece],
                v[piece],
                torch.tensor([0, n], dtype=torch.int32),
                sinks,
                case,
                dout[piece],
            )
            for part, own in zip(together[:4], alone[:4], strict=True):
                assert torch.equal(part[piece], own)


def test_threads_do_not_change_a_bit():
    generator = torch.Generator().manual_seed(13)
    case = random_case(generator) | {"lengths": [200, 3, 97], "tail": 0, "sinks": True}
    for dtype in DTYPES:
        q, k, v, cu, sinks = make(case, dtype, generator)
        dout = torch.randn(q.shape[0], case["heads"], case["value_size"], generator=generator).to(dtype)
        before = torch.get_num_threads()
        results = []
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(run(q, k, v, cu, sinks, case, dout))
        torch.set_num_threads(before)
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_one_document_does_not_reach_another(dtype):
    q, k, v = (torch.randn(40, 2, 16).to(dtype) for _ in range(3))
    q[10:20], k[10:20], v[10:20] = math.nan, math.nan, math.nan
    cu = torch.tensor([0, 10, 20, 40], dtype=torch.int32)
    case = {"causal": True, "window": 0, "softcap": 0.0}
    out, dq, dk, dv, _ = run(q, k, v, cu, None, case, torch.ones(40, 2, 16, dtype=dtype))
    for t in (out, dq, dk, dv):
        assert t[:10].isfinite().all()
        assert t[20:].isfinite().all()
    assert out[10:20].isnan().all()
    portable, _ = portable_varlen_attention(q, k, v, cu, cu, None, None, True, 0, 0.25, 0.0)
    assert torch.equal(portable.isnan(), out.isnan())


def both_ways(q, k, v, cu, window, sinks, dout):
    """out, dq, dk, dv of the operator and of the portable implementation."""
    case = {"causal": True, "window": window, "softcap": 0.0}
    options = (cu, cu, None, sinks, True, window, q.shape[2] ** -0.5, 0.0)
    out, lse = portable_varlen_attention(q, k, v, *options)
    grads = portable_varlen_attention_backward(dout, q, k, v, out, lse, *options)
    return run(q, k, v, cu, sinks, case, dout)[:4], [out, *grads[:3]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 20])
def test_what_a_query_may_not_see_has_no_influence(dtype, window):
    """NaN or infinite: rows out of its sight keep their bits, forward and backward; others show it."""
    generator = torch.Generator().manual_seed(15)
    for place, name, value in itertools.product((63, 30), "qkvd", (math.nan, math.inf)):
        q, k, v, dout = (torch.randn(70, h, 16, generator=generator).to(dtype) for h in (2, 1, 1, 2))
        sinks = torch.randn(2, generator=generator) if name in "qk" else None
        cu = torch.tensor([0, 64, 70], dtype=torch.int32)
        clean = both_ways(q, k, v, cu, window, sinks, dout)
        {"q": q, "k": k, "v": v, "d": dout}[name][place] = value
        dirty = both_ways(q, k, v, cu, window, sinks, dout)
        end = 64 if window == 0 else min(64, place + window)
        queries = [place] if name in "qd" else range(place, end)  # rows with something in sight
        first = 0 if window == 0 else max(0, min(queries) - window + 1)
        keys = range(first, max(queries) + 1)
        reached = {
            "out": [] if name == "d" else queries,
            "dq": queries,
            "dk": keys,
            "dv": [] if name == "v" else keys,
        }
        for before, after in zip(clean, dirty, strict=True):
            for (what, rows), x, y in zip(reached.items(), before, after, strict=True):
                kept = [t for t in range(70) if t not in rows]
                assert torch.equal(x[kept], y[kept]), (what, place, name, value)
                if rows and math.isnan(value):
                    assert y[list(rows)].isnan().flatten(1).any(dim=1).all(), (what, place, name)


def test_the_dout_of_a_query_without_keys_reaches_no_sink():
    generator = torch.Generator().manual_seed(17)
    q, dout = (torch.randn(4, 2, 16, generator=generator) for _ in range(2))
    k, v = (torch.randn(3, 2, 16, generator=generator) for _ in range(2))
    cu_q, cu_k = torch.tensor([0, 3, 4], dtype=torch.int32), torch.tensor([0, 3, 3], dtype=torch.int32)
    options = (cu_q, cu_k, None, torch.randn(2, generator=generator), True, 0, 0.25, 0.0)
    out, lse = torch.ops.monograph.varlen_attention(q, k, v, *options)
    for backward in (torch.ops.monograph.varlen_attention_backward, portable_varlen_attention_backward):
        dout[3] = 0.0
        clean = backward(dout, q, k, v, out, lse, *options)
        dout[3] = math.nan
        for want, got in zip(clean, backward(dout, q, k, v, out, lse, *options), strict=True):
            assert torch.equal(want, got)


def test_a_value_whose_product_overflows_has_no_influence():
    """dout . v is infinite for a key out of sight, though both are finite."""
    generator = torch.Generator().manual_seed(16)
    q, k, v, dout = (torch.randn(64, 1, 16, generator=generator) for _ in range(4))
    cu = torch.tensor([0, 64], dtype=torch.int32)
    clean = both_ways(q, k, v, cu, 0, None, dout)
    v[63], dout[63] = 3e38, 0.0
    dirty = both_ways(q, k, v, cu, 0, None, dout)
    for before, after in zip(clean, dirty, strict=True):
        assert torch.equal(before[0][:63], after[0][:63])
        assert torch.equal(before[1][:63], after[1][:63])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [8e4, 1e6])
def test_huge_scores_stay_finite(dtype, size):
    """Scores of 1e12 are further from their rounded reference than exp2 can take."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(40, 2, 32, generator=generator).to(dtype) for _ in range(3))
    q, k = (q * size).requires_grad_(), (k * size).requires_grad_()
    cu = torch.tensor([0, 23, 40], dtype=torch.int32)
    out = varlen_attention(q, k, v, cu, cu)
    gradients = torch.autograd.grad(out.float().sum(), [q, k])
    assert out.isfinite().all()
    assert out.abs().max() <= v.abs().max() * (1 + 2**-7)
    assert all(g.isfinite().all() for g in gradients)


def test_decode_padding_and_bottom_right_alignment():
    """One or few queries against a long past: the rows equal those of the whole sequence."""
    torch.manual_seed(0)
    q, k, v = torch.randn(50, 4, 16), torch.randn(50, 2, 16), torch.randn(50, 2, 16)
    whole = varlen_attention(q, k, v, torch.tensor([0, 50], dtype=torch.int32))
    for n in (1, 2, 7):
        cu_q, cu_k = (torch.tensor([0, x], dtype=torch.int32) for x in (n, 50))
        part = varlen_attention(q[-n:], k, v, cu_q, cu_k)
        torch.testing.assert_close(part, whole[-n:])
    # a cache longer than what is filled
    room = [torch.cat((t, torch.full((14, 2, 16), math.nan))) for t in (k, v)]
    cu_k = torch.tensor([0, 64], dtype=torch.int32)
    part = varlen_attention(
        q[-1:],
        *room,
        torch.tensor([0, 1], dtype=torch.int32),
        cu_k,
        key_lengths=torch.tensor([50], dtype=torch.int32),
    )
    torch.testing.assert_close(part, whole[-1:])


def test_strided_heads_are_taken_as_they_are():
    q, k, v = (torch.randn(1, 4, 30, 16).transpose(1, 2)[0] for _ in range(3))
    cu = torch.tensor([0, 30], dtype=torch.int32)
    want = varlen_attention(q.contiguous(), k.contiguous(), v.contiguous(), cu)
    assert torch.equal(varlen_attention(q, k, v, cu), want)


def test_the_portable_implementation_agrees():
    generator = torch.Generator().manual_seed(14)
    for _ in range(40):
        case = random_case(generator)
        q, k, v, cu, sinks = make(case, torch.float32, generator)
        dout = torch.randn(q.shape[0], case["heads"], case["value_size"], generator=generator)
        if case["tail"]:
            dout[-case["tail"] :] = 0
        options = (cu, cu, None, sinks, case["causal"], case["window"], case["size"] ** -0.5, case["softcap"])
        got = run(q, k, v, cu, sinks, case, dout)
        out, lse = portable_varlen_attention(q, k, v, *options)
        torch.testing.assert_close(got[0], out, rtol=1e-4, atol=1e-4)
        grads = portable_varlen_attention_backward(dout, q, k, v, out, lse, *options)
        for mine, other in zip(got[1:], grads, strict=True):
            if mine is not None:
                torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype):
    q, k, v = (torch.randn(20, h, 16).to(dtype).requires_grad_() for h in (4, 2, 2))
    cu = torch.tensor([0, 7, 20, 20], dtype=torch.int32)
    sinks = torch.randn(4, requires_grad=True)
    op = torch.ops.monograph.varlen_attention
    opcheck(op, (q, k, v, cu, cu, None, None, True, 0, 0.25, 0.0))
    opcheck(op, (q, k, v, cu, cu, None, sinks, True, 5, 0.25, 10.0))


def test_no_random_number_tag():
    """SDPA's CPU op carries one, and torch then refuses checkpointing inside a whole-step graph."""
    tags = torch.ops.monograph.varlen_attention.default.tags
    assert torch.Tag.nondeterministic_seeded not in tags


def test_one_graph_over_differently_packed_batches():
    torch._dynamo.reset()
    step = torch.compile(lambda q, k, v, cu: varlen_attention(q, k, v, cu) * 2, fullgraph=True)
    q, k, v = (torch.randn(64, 2, 16, requires_grad=True) for _ in range(3))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ([64], [10, 54], [1, 2, 3, 4], [30, 30]):
            offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
            cu = torch.nn.functional.pad(offsets, (0, 9 - offsets.numel()), value=int(offsets[-1]))
            step(q, k, v, cu).sum().backward()


def test_wrong_arguments_name_the_thing_found_and_wanted():
    q, k, v = (torch.randn(20, h, 16) for h in (4, 2, 2))
    cu = torch.tensor([0, 7, 20], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="cu_q has dtype int64, wanted int32"):
        varlen_attention(q, k, v, cu.long())
    with pytest.raises(RuntimeError, match="4 query heads are no multiple of 3"):
        varlen_attention(q, torch.randn(20, 3, 16), torch.randn(20, 3, 16), cu)
    with pytest.raises(RuntimeError, match="k is bfloat16, wanted float32"):
        varlen_attention(q, k.bfloat16(), v, cu)
    with pytest.raises(RuntimeError, match="ends at 21, there are 20 tokens"):
        varlen_attention(q, k, v, torch.tensor([0, 7, 21], dtype=torch.int32))
    with pytest.raises(RuntimeError, match="is 7, below the one before it"):
        varlen_attention(q, k, v, torch.tensor([0, 9, 7], dtype=torch.int32))
    with pytest.raises(RuntimeError, match="key_lengths has 1 entries, wanted 2"):
        varlen_attention(q, k, v, cu, key_lengths=torch.zeros(1, dtype=torch.int32))


def test_backward_takes_only_what_the_forward_returned():
    q, k, v = (torch.randn(20, h, 16) for h in (4, 2, 2))
    cu = torch.tensor([0, 7, 20], dtype=torch.int32)
    out, lse = torch.ops.monograph.varlen_attention(q, k, v, cu, cu, None, None, True, 0, 0.25, 0.0)

    def backward(dout, out, lse):
        arguments = (dout, q, k, v, out, lse, cu, cu, None, None, True, 0, 0.25, 0.0)
        for function in (torch.ops.monograph.varlen_attention_backward, portable_varlen_attention_backward):
            with pytest.raises((RuntimeError, ValueError)) as refused:
                function(*arguments)
            yield str(refused.value)

    small = torch.zeros(1, 1, 1)
    assert all("dout has shape [1, 1, 1], wanted [20, 4, 16]" in text for text in backward(small, out, lse))
    assert all("out has shape [1, 1, 1], wanted [20, 4, 16]" in text for text in backward(out, small, lse))
    assert all("wanted" in text and "[4, 20]" in text for text in backward(out, out, lse.t().contiguous()))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [2**31, 2**40, 2**40 + 1, 2**63 - 1])
def test_a_window_of_any_size_is_no_window_when_it_is_longer_than_the_text(window, causal):
    """2^63 - 1 overflowed, and a query saw nothing."""
    q, k, v = (torch.randn(70, h, 16) for h in (4, 2, 2))
    cu = torch.tensor([0, 7, 70], dtype=torch.int32)
    want = varlen_attention(q, k, v, cu, causal=causal)
    assert torch.equal(varlen_attention(q, k, v, cu, causal=causal, window=window), want)
    portable = portable_varlen_attention(q, k, v, cu, cu, None, None, causal, window, 0.25, 0.0)[0]
    assert error(portable, want) < 1e-5
    with pytest.raises(RuntimeError, match="window is -1, wanted 0 for none or more"):
        varlen_attention(q, k, v, cu, window=-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_chooses_the_type(dtype):
    """Rotary embeddings in float32 leave q and k in float32 beside a v of the layer above."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, 2, 16, generator=generator) for _ in range(3))
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    with torch.autocast("cpu", dtype=dtype):
        out = varlen_attention(q, k, v.to(dtype), cu)
    assert out.dtype == dtype
    assert torch.equal(out, varlen_attention(*(t.to(dtype) for t in (q, k, v)), cu))
