"""The error of gated_delta_rule at length 8192 in bf16, beside that of transformers' float32 code."""

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from monograph.ops.gated_delta_rule import gated_delta_rule
from support.delta_rule_inputs import KINDS, NAMES, drawn, far, offsets, portable

TOKENS, HEADS, SIZES = 8192, (1, 1), (128, 128)


def results(function, tensors, dout):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = function(*leaves)
    return out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_no_further_from_float64_than_the_fallback(kind):
    """Values at most twice, gradients at most three times its error. Of g at most 1e-2: the fallback gives
    its gradient in float32 from float32 products, ours come from products of bf16."""
    tensors = drawn(kind, TOKENS, HEADS, SIZES, dtype=torch.bfloat16)
    cu = offsets([0, TOKENS])
    dout = torch.randn(TOKENS, HEADS[1], SIZES[1], generator=torch.Generator().manual_seed(5)).bfloat16()
    exact = results(lambda *t: portable(*t, cu)[0], [t.double() for t in tensors], dout)

    def fallback(*leaves):
        batch = [t[None] for t in leaves]
        return theirs.torch_chunk_gated_delta_rule(*batch, use_qk_l2norm_in_kernel=True)[0][0]

    ours = results(lambda *t: gated_delta_rule(*t, cu)[0], tensors, dout)
    peer = results(fallback, tensors, dout)
    errors = {
        name: (far(mine, want), far(their, want))
        for name, mine, their, want in zip(("out", *NAMES), ours, peer, exact, strict=True)
    }
    assert errors["out"][0] <= 2 * errors["out"][1], errors
    for name in NAMES:
        limit = 1e-2 if name == "g" else 3 * errors[name][1]
        assert errors[name][0] <= limit, (name, errors)
