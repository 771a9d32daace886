"""What mark_not_offload can do, and what it cannot: a mark counts for what is saved after it."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import monograph as mg
from monograph.ops import gated_delta_rule_fla, providers
from monograph.ops.causal_conv1d import causal_conv1d
from monograph.ops.gated_delta_rule import gated_delta_rule
from monograph.ops.varlen_attention import varlen_attention
from support import fla_stand_in
from support.expert_layers import Case

TOKENS, HEADS, SIZE = 32, 2, 16
CU = torch.tensor([0, 20, TOKENS], dtype=torch.int32)


def test_the_example_of_its_documentation(tmp_path):
    model = nn.ModuleList([nn.Linear(64, 128), nn.Linear(128, 64)])
    up_proj, down_proj = model
    x = torch.randn(8, 64, requires_grad=True)

    def writes(mark):
        with mg.offload_activations(model, folder=tmp_path, min_bytes=0) as context:
            up = up_proj(x)
            if mark:
                mg.mark_not_offload(up)
            down_proj(up).sum().backward()
            return context.counts().writes

    assert (writes(mark=False), writes(mark=True)) == (2, 1)


def test_a_result_that_its_operation_saves_has_gone_before_the_mark(tmp_path):
    """As the documentation says; if torch ever saves such results later, it is to be said no longer."""
    q, k, v = (torch.randn(1, HEADS, TOKENS, SIZE, requires_grad=True) for _ in range(3))
    for mark in (False, True):
        with mg.offload_activations(folder=tmp_path, min_bytes=TOKENS * SIZE) as context:
            out = scaled_dot_product_attention(q * 1, k * 1, v * 1)
            saved = context.counts().writes
            if mark:
                mg.mark_not_offload(out)
            out.sum().backward()
            assert context.counts().writes == saved >= 4


def attended(tmp_path, attention):
    torch.manual_seed(0)
    q, k, v = (torch.randn(TOKENS, HEADS, SIZE, requires_grad=True) for _ in range(3))
    project = nn.Linear(HEADS * SIZE, 8)
    # Above the log-sum-exp, below q, k, v and the output.
    with mg.offload_activations(project, folder=tmp_path, min_bytes=2048, attention=attention) as context:
        out = varlen_attention(q * 1, k * 1, v * 1, CU)
        y = project(out.reshape(TOKENS, -1)).square().sum()
        counts = context.counts()
        y.backward()
    return [t.grad for t in (q, k, v)], counts


def test_our_attention_marks_its_output_before_it_is_saved(tmp_path):
    gone, of_gone = attended(tmp_path, attention=True)
    kept, of_kept = attended(tmp_path, attention=False)
    assert of_gone.writes == of_kept.writes + 1
    assert of_gone.bytes_written == of_kept.bytes_written + 4 * TOKENS * HEADS * SIZE
    for one, other in zip(gone, kept, strict=True):
        assert torch.equal(one, other)


def test_the_innermost_context_says_whether_attention_stays(tmp_path):
    q = torch.randn(TOKENS, HEADS, SIZE, requires_grad=True)
    with mg.offload_activations(folder=tmp_path, min_bytes=2048, attention=False) as outer:
        with mg.offload_activations(folder=tmp_path, min_bytes=2048) as inner:
            varlen_attention(q * 1, q * 1, q * 1, CU)
        assert (outer.counts().writes, inner.counts().writes) == (0, 4)
        varlen_attention(q * 1, q * 1, q * 1, CU)
    assert outer.counts().writes == 3
    with mg.offload_activations(folder=tmp_path, min_bytes=2048) as context:
        varlen_attention(q * 1, q * 1, q * 1, CU)
    assert context.counts().writes == 4


def experts_call():
    case = Case("qwen3_moe", "plain", torch.float32)
    names = list(case.leaves)
    return lambda *own: case.operator(dict(zip(names, own, strict=True))), list(case.leaves.values())


def rule_call():
    shapes = [(TOKENS, 1, 8), (TOKENS, 1, 8), (TOKENS, 2, 8), (TOKENS, 2), (TOKENS, 2)]
    q, k, v, g, beta = (torch.rand(shape) for shape in shapes)
    return lambda *own: gated_delta_rule(*own, CU)[0], [q, k, v, -g, beta]


def conv_call():
    leaves = [torch.randn(shape) for shape in ((TOKENS, 8), (8, 4), (8,))]
    return lambda x, weight, bias: causal_conv1d(x, weight, bias, CU)[0], leaves


# The providers of attention: hf/test_attention_on_cuda.py.
BY = {
    ("experts", "torch"): experts_call,
    ("gated_delta_rule", "fla"): rule_call,
    ("causal_conv1d", "fla"): conv_call,
}


def test_every_provider_is_among_these():
    assert {*BY, ("varlen_attention", "torch"), ("varlen_attention", "flash-attn")} == set(providers.CALLS)


@pytest.mark.parametrize(("operator", "provider"), BY, ids=str)
def test_marks_hold_whoever_computes(operator, provider, tmp_path, monkeypatch):
    """Marked inputs stay, gradients are the same, and a backward that runs another forward writes nothing."""
    fla_stand_in.install(monkeypatch, "cpu")
    monkeypatch.setattr(gated_delta_rule_fla, "DTYPES", (torch.float32,))
    torch.manual_seed(0)
    call, leaves = BY[operator, provider]()
    leaves = [leaf.requires_grad_() for leaf in leaves]

    def run(mark):
        with mg.offload_activations(folder=tmp_path, min_bytes=1) as context:
            inputs = [leaf * 1 for leaf in leaves]
            if mark:
                mg.mark_not_offload(*inputs)
            out = call(*inputs)
            writes = context.counts().writes
            gradients = torch.autograd.grad(out.sum(), leaves)
            assert context.counts().writes == writes
        return writes, gradients

    with providers.using({operator: provider}):
        (gone, want), (kept, got) = run(mark=False), run(mark=True)
    providers._looked_up.cache_clear()
    assert gone - kept == len(leaves)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
