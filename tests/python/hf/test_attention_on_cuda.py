"""Attention over documents by flash attention behind our operator, and who computes it on which device.

There is no GPU here: aten's flash attention is a reference in float64 on the CPU, which leaves rows that no
document has as NaN, where the real one leaves memory as it was found; so is flash-attn, by the signatures of
its functions. What they are given is what a card would be given. The results are compared with a dense mask
in float64, and with the portable implementation.
"""

import sys
import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM

from monograph.hf.transformers import attention
from monograph.ops import attention_choice, offload_marks, providers, varlen_attention
from monograph.ops.attention_choice import Asked, attention_provider, why_not_varlen
from monograph.ops.documents import assert_ascending
from monograph.upstream.torch_names import call_portable
from support.attention_models import after_optimize, build
from support.provider_rows import give_kernels, give_row

CUDA = torch.device("cuda:0")
GOOD = Asked(torch.bfloat16, 64, 64)


def _documents(cu_q, cu_k):
    pairs = zip(cu_q.tolist(), cu_q[1:].tolist(), cu_k.tolist(), cu_k[1:].tolist(), strict=False)
    return [(slice(a, b), slice(c, d)) for a, b, c, d in pairs]


def _scores(q, k, causal, scale, left, right, softcap):
    """Flash attention's rule: bottom right aligned, `left` keys before the query's place, `right` behind."""
    place = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    distance = place - torch.arange(k.shape[0])[None]
    right = 0 if causal else right
    seen = ((left < 0) | (distance <= left)) & ((right < 0) | (distance >= -right))
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    slope = torch.full_like(scores, scale)
    if softcap:
        slope = scale * (1 - torch.tanh(scores / softcap) ** 2)
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~seen, -torch.inf), slope


def _forward(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, left, right, softcap=0.0):
    assert cu_q.dtype == torch.int32
    out = torch.full_like(q, torch.nan)
    lse = torch.full((q.shape[1], q.shape[0]), torch.nan)
    for rows, keys in _documents(cu_q, cu_k):
        assert rows.stop - rows.start <= max_q
        assert keys.stop - keys.start <= max_k
        if rows.stop == rows.start:
            continue
        scores, _ = _scores(q[rows], k[keys], causal, scale, left, right, softcap)
        values = v[keys].double().repeat_interleave(q.shape[1] // v.shape[1], 1)
        out[rows] = torch.einsum("hqk,khd->qhd", torch.nan_to_num(scores.softmax(-1)), values).to(q.dtype)
        found = torch.logsumexp(scores, -1)
        lse[:, rows] = torch.where(found == -torch.inf, torch.inf, found).float()
    return out, lse


def _backward(dout, q, k, v, lse, cu_q, cu_k, causal, scale, left, right, softcap=0.0):
    """From the log-sum-exp alone, as the real one: infinity where a query sees no key."""
    grads = [torch.full_like(t, torch.nan) for t in (q, k, v)]
    for rows, keys in _documents(cu_q, cu_k):
        group = q.shape[1] // k.shape[1]
        scores, slope = _scores(q[rows], k[keys], causal, scale, left, right, softcap)
        p = torch.exp(scores - lse[:, rows, None].double())
        up = dout[rows].double()
        qs, ks, vs = (t.double() for t in (q[rows], k[keys], v[keys]))
        along = torch.einsum("qhd,khd->hqk", up, vs.repeat_interleave(group, 1))
        ds = p * (along - (p * along).sum(-1, keepdim=True)) * slope
        found = [
            torch.einsum("hqk,khd->qhd", ds, ks.repeat_interleave(group, 1)),
            torch.einsum("hqk,qhd->khd", ds, qs).unflatten(1, (-1, group)).sum(2),
            torch.einsum("hqk,qhd->khd", p, up).unflatten(1, (-1, group)).sum(2),
        ]
        for grad, place, value in zip(grads, (rows, keys, keys), found, strict=True):
            grad[place] = value.to(grad.dtype)
    return tuple(grads)


def _aten_forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, **options):
    assert dropout == 0.0
    assert options.get("seqused_k") is None
    window = options["window_size_left"], options["window_size_right"]
    out, lse = _forward(q, k, v, cu_q, cu_k, max_q, max_k, causal, options["scale"], *window)
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.zeros(0), torch.zeros(0)


def _aten_backward(dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, *_, **options):
    window = options["window_size_left"], options["window_size_right"]
    return _backward(dout, q, k, v, lse, cu_q, cu_k, causal, options["scale"], *window)


# The functions of flash-attn 2.8.3, by their signatures there.


def _flash_attn_varlen_forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    return_softmax=False,
    block_table=None,
    leftpad_k=None,
    seqused_k=None,
    zero_tensors=False,
):
    assert dropout_p == 0.0
    assert q.shape[-1] % 8 == 0
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    window = window_size_left, window_size_right
    out, lse = _forward(q, k, v, *lengths, causal, softmax_scale, *window, softcap)
    return out, lse, torch.zeros(0), torch.zeros(2, dtype=torch.int64)


def _flash_attn_varlen_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    deterministic,
    rng_state=None,
    zero_tensors=False,
):
    assert dropout_p == 0.0
    assert isinstance(deterministic, bool)
    window = window_size_left, window_size_right
    offsets = cu_seqlens_q, cu_seqlens_k
    found = _backward(dout, q, k, v, softmax_lse, *offsets, causal, softmax_scale, *window, softcap)
    for to, value in zip((dq, dk, dv), found, strict=True):
        to.copy_(value)
    return torch.zeros(0)


@pytest.fixture(params=["torch", "flash-attn"])
def flash(request, monkeypatch):
    """Each of the two, in the place of the CPU's kernel."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _aten_forward, "CPU")
    library.impl("_flash_attention_backward", _aten_backward, "CPU")
    interface = types.ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_varlen_forward = _flash_attn_varlen_forward
    interface._flash_attn_varlen_backward = _flash_attn_varlen_backward
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    monkeypatch.setattr(providers, "why_missing", lambda provider, asked=False: None)
    give_row(monkeypatch, "varlen_attention", "cpu", "torch", "flash-attn")
    monkeypatch.setattr(attention_choice, "DTYPES", (torch.float32, torch.float64))
    with providers.using({"varlen_attention": request.param}):
        yield request.param
    library._destroy()


def _dense(q, k, v, cu_q, cu_k, lengths, causal, window, scale, softcap=0.0):
    """By one mask over all rows, in float64: the definition in docs/explain/attention.md."""
    seen = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bool)
    for d, (rows, keys) in enumerate(_documents(cu_q, cu_k)):
        length = keys.stop - keys.start if lengths is None else int(lengths[d])
        for i in range(rows.start, rows.stop):
            place = i - rows.start + length - (rows.stop - rows.start)
            for j in range(length):
                near = window == 0 or abs(place - j) < window
                seen[i, keys.start + j] = near and (not causal or j <= place)
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.einsum(
        "hqk,khd->qhd", torch.nan_to_num(scores.masked_fill(~seen, -1e300).softmax(-1)) * seen, v
    )


CASES = {
    "packed, padding behind": ([0, 5, 12, 12, 20], None, None),
    "padding before": ([3, 9, 23], None, None),
    "padded rows": ([0, 2, 9, 12, 12, 20, 24], [0, 2, 9, 12, 12, 20, 24], [0, 7, 0, 0, 8, 0]),
    "a cache": ([0, 12, 24], [0, 30, 60], [20, 30]),
}


def _tensors(case):
    """q, k and v, as many keys as the case has, and its offsets."""
    torch.manual_seed(0)
    cu_q, cu_k, lengths = (
        None if given is None else torch.tensor(given, dtype=torch.int32) for given in CASES[case]
    )
    keys = 24 if cu_k is None else max(int(cu_k[-1]), 24)
    shapes = ((24, 4, 8), (keys, 2, 8), (keys, 2, 8))
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    return tensors, cu_q, cu_k, lengths


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("causal", "window"), [(True, 0), (True, 3), (False, 0), (False, 3)])
def test_flash_attention_gives_what_the_definition_says(flash, case, causal, window):
    tensors, cu_q, cu_k, lengths = _tensors(case)
    softcap = 2.0 if flash == "flash-attn" else 0.0
    want = _dense(*tensors, cu_q, cu_q if cu_k is None else cu_k, lengths, causal, window, 0.3, softcap)
    options = {"causal": causal, "window": window, "scale": 0.3, "softcap": softcap}
    got = varlen_attention.varlen_attention(*tensors, cu_q, cu_k, key_lengths=lengths, **options)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    up = torch.randn_like(want)
    for a, b in zip(
        torch.autograd.grad(got, tensors, up), torch.autograd.grad(want, tensors, up), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # the log-sum-exp has 24 bits


@pytest.mark.parametrize("case", CASES)
def test_output_and_log_sum_exp_are_those_of_the_operator(flash, case):
    """Of the same operator, computed portably: what one keeps, the other's gradient may be given."""
    tensors, cu_q, cu_k, lengths = _tensors(case)
    rest = (cu_q, cu_q if cu_k is None else cu_k, lengths, None, True, 3, 0.3, 0.0)
    operator = torch.ops.monograph.varlen_attention.default
    got = [t.detach() for t in operator(*tensors, *rest)]
    with providers.using({"varlen_attention": "portable"}):
        want = [t.detach() for t in call_portable(operator, *tensors, *rest)]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_heads_of_any_size_by_flash_attn(flash):
    q, k = (torch.randn(9, heads, 6, requires_grad=True) for heads in (4, 2))
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    if flash == "torch":
        with pytest.raises(ValueError, match="size of a head is 6, wanted a multiple of 8"):
            varlen_attention.varlen_attention(q, k, k, cu)
        return
    got = varlen_attention.varlen_attention(q, k, k, cu)
    want = _dense(q.double(), k.double(), k.double(), cu, cu, None, True, 0, 6**-0.5).float()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), (q, k)) for y in (got, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_one_graph_without_a_read_of_the_offsets(flash, monkeypatch):
    """As on a CUDA device, where offsets are asserted, not read; compiled whole, by whom is decided once."""
    monkeypatch.setattr(varlen_attention, "check_offsets", assert_ascending)
    q, k, v = (torch.randn(24, heads, 8, requires_grad=True) for heads in (4, 2, 2))

    def loss(q, k, v, cu):
        return varlen_attention.varlen_attention(q, k, v, cu, window=3, scale=0.3).square().sum()

    providers.install()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for boundaries in ([0, 5, 12, 24], [0, 9, 9, 20], [0, 24, 24, 24]):
            cu = torch.tensor(boundaries, dtype=torch.int32)
            want = torch.autograd.grad(loss(q, k, v, cu), (q, k, v))
            got = torch.autograd.grad(compiled(q, k, v, cu), (q, k, v))
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b)


def test_its_output_is_kept_out_of_an_offload_in_time(flash):
    q, k = (torch.randn(9, heads, 8, requires_grad=True) for heads in (4, 2))
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    for kept in (False, True):
        offload_marks.enter_context(attention=not kept)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, to=saved: to.append(t), lambda t: t):
            varlen_attention.varlen_attention(q, k, k, cu)
        offload_marks.leave_context()
        assert any(offload_marks.is_marked(t.untyped_storage()) for t in saved) == kept


def test_a_second_derivative_is_refused(flash):
    q = torch.randn(4, 2, 8, requires_grad=True)
    cu = torch.tensor([0, 4], dtype=torch.int32)
    out = varlen_attention.varlen_attention(q, q, q, cu)
    (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    ("change", "capability", "reason"),
    [
        ({}, (8, 0), None),
        ({"dtype": torch.float16, "size": 256, "value_size": 256, "scale": 0.1}, (12, 0), None),
        ({"tokens": 4096, "slots": 64}, (9, 0), None),
        ({}, (7, 5), "compute capability 7.5, wanted 8.0"),
        ({"dtype": torch.float32}, (8, 0), "dtype is float32, wanted bfloat16 or float16"),
        ({"softcap": 50.0}, (8, 0), "softcap is 50.0, wanted none"),
        ({"sinks": True}, (8, 0), "there are sinks"),
        ({"value_size": 32}, (8, 0), "heads of queries have 64 numbers, of values 32"),
        ({"size": 512, "value_size": 512}, (8, 0), "size of a head is 512, wanted a multiple of 8 up to 256"),
        ({"size": 60, "value_size": 60}, (8, 0), "size of a head is 60"),
        ({"scale": -1.0}, (8, 0), "scale is -1.0"),
        ({"tokens": 4096, "slots": 4096}, (8, 0), "room for 4096 documents in 4096 tokens"),
        ({"tokens": 2**24, "slots": 65536}, (8, 0), "wanted 65535 or fewer"),
    ],
)
def test_what_flash_attention_cannot_do_is_named(monkeypatch, change, capability, reason):
    asked = Asked(**(vars(GOOD) | change))
    monkeypatch.setattr(attention_choice, "_capability", lambda index: capability)
    if reason is None:
        assert attention_provider(CUDA, asked) == "torch"
        return
    assert reason in why_not_varlen(asked, capability)
    with pytest.raises(ValueError, match=r"monograph attention on cuda:0: .*attn_implementation=.sdpa"):
        attention_provider(CUDA, asked)
    # A kernel of ours takes it, and other devices have the portable implementation.
    assert attention_provider(torch.device("cpu"), asked) == "monograph"
    assert attention_provider(torch.device("xpu"), asked) == "portable"
    give_kernels(monkeypatch, True)
    assert attention_provider(CUDA, asked) == "monograph"


def test_an_older_torch_is_named(monkeypatch):
    import torch.nn.attention.varlen as varlen

    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
        raise AssertionError

    monkeypatch.setattr(varlen, "varlen_attn", older)
    attention_choice._missing_in_torch.cache_clear()
    try:
        assert "has no scale, wanted 2.13" in why_not_varlen(GOOD)
    finally:
        attention_choice._missing_in_torch.cache_clear()


def test_cuda_tensors_go_there_and_never_to_the_portable_implementation(monkeypatch):
    """On tensors that say they are on a card, and have no memory: a graph refuses while it is traced."""
    monkeypatch.setattr(attention_choice, "_capability", lambda index: (8, 0))
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k = (torch.empty(16, heads, 64, dtype=torch.bfloat16, device=CUDA) for heads in (4, 2))
        cu = torch.empty(3, dtype=torch.int32, device=CUDA)
        found = [varlen_attention.varlen_attention(q, k, k, cu, window=5)]
        torch.set_autocast_enabled("cuda", True)  # torch.autocast wants a card
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        found.append(varlen_attention.varlen_attention(q.float(), k.float(), k, cu))
        torch.set_autocast_enabled("cuda", False)
        with pytest.raises(ValueError, match=r"softcap is 30\.0.*; flash-attn is not installed; else wanted"):
            varlen_attention.varlen_attention(q, k, k, cu, softcap=30.0)
        with pytest.raises(ValueError, match="dtype is float32"):
            varlen_attention.varlen_attention(q.float(), k.float(), k.float(), cu)
    assert {(t.dtype, t.device, tuple(t.shape)) for t in found} == {(torch.bfloat16, CUDA, (16, 4, 64))}


def test_a_call_that_nobody_can_do_is_refused_where_there_is_no_portable_one(flash):
    q = torch.randn(4, 2, 8)
    cu = torch.tensor([0, 4], dtype=torch.int32)
    sinks = torch.zeros(2)
    asked = rf"varlen_attention on cpu: {flash}: there are sinks, wanted none; .* wanted attn_implementation"
    for call in (varlen_attention.varlen_attention, lambda q, k, v, cu, sinks: _operator(q, cu, sinks)):
        with pytest.raises(ValueError, match=asked):
            call(q, q, q, cu, sinks=sinks)


def _operator(q, cu, sinks):
    return torch.ops.monograph.varlen_attention(q, q, q, cu, cu, None, sinks, True, 0, 0.3, 0.0)


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
}


def test_a_model_on_a_card_takes_ours_only_if_flash_attention_can(monkeypatch):
    monkeypatch.setattr(attention_choice, "_capability", lambda index: (8, 0))
    monkeypatch.setattr(attention, "device_of", lambda model: CUDA)
    llama = build()
    assert after_optimize(llama) == "sdpa"  # float32
    assert after_optimize(llama.bfloat16()) == "monograph"
    assert after_optimize(build(attn_implementation="eager").bfloat16()) == "eager"
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    capped = Gemma2ForCausalLM(Gemma2Config(**SMALL)).bfloat16()
    sunk = GptOssForCausalLM(GptOssConfig(**SMALL, **experts)).bfloat16()
    for model, reason in ((capped, "softcap is 50.0"), (sunk, "there are sinks")):
        before = model.config._attn_implementation
        assert after_optimize(model) == before != "monograph"
        with pytest.raises(ValueError, match=f"attention=True on cuda: .*{reason}"):
            after_optimize(model, attention=True)
