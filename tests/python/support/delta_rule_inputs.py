"""Inputs, settings and the portable implementation of gated_delta_rule, and how far results are apart."""

import torch

from monograph.ops.gated_delta_rule import (
    portable_gated_delta_rule,
    portable_gated_delta_rule_backward,
)

NAMES = ("q", "k", "v", "g", "beta")
KINDS = ["strong", "mixed", "correlated", "beta_to_2", "plain"]
CU = [2, 9, 9, 80, 150, 150]  # gaps at both ends, an empty document, one longer than a chunk


def drawn(kind="plain", tokens=150, heads=(2, 4), sizes=(16, 24), dtype=torch.float32, g_dtype=torch.float32):
    """q, k, v, g, beta with the distributions that are hard: for the decay, the solve, the eigenvalues."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    q, k = (torch.nn.functional.silu(normal(tokens, heads[0], sizes[0]) + 0.5) for _ in range(2))
    v = torch.nn.functional.silu(normal(tokens, heads[1], sizes[1]))
    beta = torch.sigmoid(normal(tokens, heads[1]))
    g = -0.05 * torch.nn.functional.softplus(normal(tokens, heads[1]))
    some = torch.randint(0, 8, (tokens, heads[0]), generator=generator)
    if kind == "strong":
        g = -16 * torch.nn.functional.softplus(normal(tokens, heads[1]) + 1)
    elif kind == "mixed":
        factor = torch.where(torch.rand(tokens, heads[1], generator=generator) < 0.05, 30.0, 0.02)
        g = -factor * torch.nn.functional.softplus(normal(tokens, heads[1]))
    elif kind == "correlated":
        k = normal(8, sizes[0])[some] + 0.3 * normal(tokens, heads[0], sizes[0])
        beta, g = torch.sigmoid(normal(tokens, heads[1]) + 3), 0.02 * g
    elif kind == "beta_to_2":
        k = normal(8, sizes[0])[some] + 0.5 * normal(tokens, heads[0], sizes[0])
        beta, g = 2 * torch.sigmoid(normal(tokens, heads[1]) + 1), 0.1 * g
    return [*(t.to(dtype) for t in (q, k, v)), g.to(g_dtype), beta.to(dtype)]


def offsets(values=CU):
    return torch.tensor(values, dtype=torch.int32)


class Portable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        *tensors, ctx.scale, ctx.l2norm, keep_state = arguments
        ctx.save_for_backward(*tensors)
        return portable_gated_delta_rule(*tensors, ctx.scale, ctx.l2norm, keep_state)

    @staticmethod
    def backward(ctx, dout, dfinal):
        dfinal = dfinal if dfinal.numel() else None
        *grads, dstate = portable_gated_delta_rule_backward(
            dout, dfinal, *ctx.saved_tensors, ctx.scale, ctx.l2norm
        )
        return *grads, None, dstate if dstate.numel() else None, None, None, None


def portable(q, k, v, g, beta, cu, state=None, *, scale=None, l2norm=True, keep_state=False):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return Portable.apply(q, k, v, g, beta, cu, state, scale, l2norm, keep_state)


def far(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()
