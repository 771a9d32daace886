"""Attention over documents by torch.nn.attention.varlen, and who computes attention on which device.

There is no GPU here: aten's flash attention is a reference in float64 on the CPU, which leaves rows that no
document has as NaN, where the real one leaves memory as it was found. What it is given is what a card would
be given. The results are compared with a dense mask in float64.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM

from monograph.hf.transformers import attention
from monograph.ops import attention_choice, varlen_attention
from monograph.ops.attention_choice import Asked, attention_path, why_not_varlen
from monograph.ops.documents import assert_ascending
from monograph.ops.flash_documents import flash_documents
from support.attention_models import after_optimize, build

CUDA = torch.device("cuda:0")
GOOD = Asked(torch.bfloat16, 64, 64)


def _documents(cu_q, cu_k):
    pairs = zip(cu_q.tolist(), cu_q[1:].tolist(), cu_k.tolist(), cu_k[1:].tolist(), strict=False)
    return [(slice(a, b), slice(c, d)) for a, b, c, d in pairs]


def _weights(q, k, causal, scale, left, right):
    """Flash attention's rule: bottom right aligned, `left` keys before the query's place, `right` behind."""
    place = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    distance = place - torch.arange(k.shape[0])[None]
    right = 0 if causal else right
    seen = ((left < 0) | (distance <= left)) & ((right < 0) | (distance >= -right))
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    return torch.nan_to_num(scores.masked_fill(~seen, -torch.inf).softmax(-1))


def _forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, **options):
    left, right = options["window_size_left"], options["window_size_right"]
    assert dropout == 0.0
    assert cu_q.dtype == torch.int32
    assert options.get("seqused_k") is None
    out = torch.full_like(q, torch.nan)
    for rows, keys in _documents(cu_q, cu_k):
        assert rows.stop - rows.start <= max_q
        assert keys.stop - keys.start <= max_k
        if rows.stop == rows.start or keys.stop == keys.start:
            continue
        p = _weights(q[rows], k[keys], causal, options["scale"], left, right)
        values = v[keys].double().repeat_interleave(q.shape[1] // v.shape[1], 1)
        out[rows] = torch.einsum("hqk,khd->qhd", p, values).to(q.dtype)
    lse = torch.zeros(q.shape[1], q.shape[0])
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.zeros(0), torch.zeros(0)


def _backward(dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, *_, **options):
    left, right = options["window_size_left"], options["window_size_right"]
    grads = [torch.full_like(t, torch.nan) for t in (q, k, v)]
    for rows, keys in _documents(cu_q, cu_k):
        if rows.stop == rows.start or keys.stop == keys.start:
            continue
        group, scale = q.shape[1] // k.shape[1], options["scale"]
        p = _weights(q[rows], k[keys], causal, scale, left, right)
        up = dout[rows].double()
        qs, ks, vs = (t.double() for t in (q[rows], k[keys], v[keys]))
        along = torch.einsum("qhd,khd->hqk", up, vs.repeat_interleave(group, 1))
        ds = p * (along - (p * along).sum(-1, keepdim=True)) * scale
        found = [
            torch.einsum("hqk,khd->qhd", ds, ks.repeat_interleave(group, 1)),
            torch.einsum("hqk,qhd->khd", ds, qs).unflatten(1, (-1, group)).sum(2),
            torch.einsum("hqk,qhd->khd", p, up).unflatten(1, (-1, group)).sum(2),
        ]
        for grad, place, value in zip(grads, (rows, keys, keys), found, strict=True):
            grad[place] = value.to(grad.dtype)
    return tuple(grads)


@pytest.fixture
def flash():
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _forward, "CPU")
    library.impl("_flash_attention_backward", _backward, "CPU")
    yield
    library._destroy()


def _dense(q, k, v, cu_q, cu_k, lengths, causal, window, scale):
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
    return torch.einsum(
        "hqk,khd->qhd", torch.nan_to_num(scores.masked_fill(~seen, -1e300).softmax(-1)) * seen, v
    )


CASES = {
    "packed, padding behind": ([0, 5, 12, 12, 20], None, None),
    "padding before": ([3, 9, 23], None, None),
    "padded rows": ([0, 2, 9, 12, 12, 20, 24], [0, 2, 9, 12, 12, 20, 24], [0, 7, 0, 0, 8, 0]),
    "a cache": ([0, 12, 24], [0, 30, 60], [20, 30]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("causal", "window"), [(True, 0), (True, 3), (False, 0), (False, 3)])
def test_flash_attention_gives_what_the_definition_says(flash, case, causal, window):
    torch.manual_seed(0)
    cu_q, cu_k, lengths = (
        None if given is None else torch.tensor(given, dtype=torch.int32) for given in CASES[case]
    )
    same = cu_k is None
    cu_k = cu_q if same else cu_k
    keys = 24 if same else max(int(cu_k[-1]), 24)
    shapes = ((24, 4, 8), (keys, 2, 8), (keys, 2, 8))
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    want = _dense(*tensors, cu_q, cu_k, lengths, causal, window, 0.3)
    got = flash_documents(*tensors, cu_q, cu_k, lengths, causal=causal, window=window, scale=0.3)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    up = torch.randn_like(want)
    for a, b in zip(
        torch.autograd.grad(got, tensors, up), torch.autograd.grad(want, tensors, up), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_one_graph_without_a_read_of_the_offsets(flash, monkeypatch):
    """As on a CUDA device, where offsets are asserted, not read; compiled whole."""
    monkeypatch.setattr(varlen_attention, "check_offsets", assert_ascending)
    q, k, v = (torch.randn(24, heads, 8, requires_grad=True) for heads in (4, 2, 2))

    def loss(q, k, v, cu):
        varlen_attention._check_arguments("varlen_attention", q, k, v, cu, cu, None, None, 3, 0.3, 0.0)
        return flash_documents(q, k, v, cu, cu, None, causal=True, window=3, scale=0.3).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for boundaries in ([0, 5, 12, 24], [0, 9, 9, 20]):
        cu = torch.tensor(boundaries, dtype=torch.int32)
        want = torch.autograd.grad(loss(q, k, v, cu), (q, k, v))
        got = torch.autograd.grad(compiled(q, k, v, cu), (q, k, v))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


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
        assert attention_path(CUDA, asked) == "varlen"
        return
    assert reason in why_not_varlen(asked, capability)
    with pytest.raises(ValueError, match=r"monograph attention on cuda:0: .*attn_implementation=.sdpa"):
        attention_path(CUDA, asked)
    # A kernel of ours takes it, and other devices have the portable implementation.
    assert attention_path(torch.device("cpu"), asked) == "kernel"
    assert attention_path(torch.device("xpu"), asked) == "portable"
    monkeypatch.setattr(attention_choice, "has_kernel", lambda name, device: True)
    assert attention_path(CUDA, asked) == "kernel"


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
    """On tensors that say they are on a card, and have no memory."""
    called = []
    monkeypatch.setattr(attention_choice, "_capability", lambda index: (8, 0))
    monkeypatch.setattr(varlen_attention, "flash_documents", lambda *a, **k: called.append((a, k)))
    monkeypatch.setattr(varlen_attention, "_check_arguments", lambda *_: None)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k = (torch.empty(16, heads, 64, dtype=torch.bfloat16, device=CUDA) for heads in (4, 2))
        cu = torch.empty(3, dtype=torch.int32, device=CUDA)
        varlen_attention.varlen_attention(q, k, k, cu, window=5, longest=(16, 16))
        torch.set_autocast_enabled("cuda", True)  # torch.autocast wants a card
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        varlen_attention.varlen_attention(q.float(), k.float(), k, cu)
        torch.set_autocast_enabled("cuda", False)
        with pytest.raises(ValueError, match=r"softcap is 30\.0"):
            varlen_attention.varlen_attention(q, k, k, cu, softcap=30.0)
        with pytest.raises(ValueError, match="dtype is float32"):
            varlen_attention.varlen_attention(q.float(), k.float(), k.float(), cu)
    assert [options["window"] for _, options in called] == [5, 0]
    assert called[0][1]["longest"] == (16, 16)
    assert {t.dtype for t in called[1][0][:3]} == {torch.bfloat16}


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
