"""Inputs, settings and the portable implementation of gated_delta_rule, and how far results are apart."""

from __future__ import annotations

from typing import Any

import torch

from monograph.ops.gated_delta_rule import (
    portable_gated_delta_rule,
    portable_gated_delta_rule_backward,
)

NAMES = ("q", "k", "v", "g", "beta")
KINDS = ["strong", "mixed", "correlated", "beta_to_2", "plain"]
CU = [2, 9, 9, 80, 150, 150]  # gaps at both ends, an empty document, one longer than a chunk


def drawn(
    kind: str = "plain",
    tokens: int = 150,
    heads: tuple[int, int] = (2, 4),
    sizes: tuple[int, int] = (16, 24),
    dtype: torch.dtype = torch.float32,
    g_dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """q, k, v, g, beta with the distributions that are hard: for the decay, the solve, the eigenvalues."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
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


def offsets(values: list[int] = CU) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Portable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        q, k, v, g, beta, cu, state, ctx.scale, ctx.l2norm, keep_state = arguments
        ctx.save_for_backward(q, k, v, g, beta, cu, state)
        return portable_gated_delta_rule(q, k, v, g, beta, cu, state, ctx.scale, ctx.l2norm, keep_state)

    @staticmethod
    def backward(ctx: Any, dout: Any, dfinal: Any) -> Any:
        dfinal = dfinal if dfinal.numel() else None
        tensors: Any = (*ctx.saved_tensors, ctx.scale, ctx.l2norm)
        *grads, dstate = portable_gated_delta_rule_backward(dout, dfinal, *tensors)
        return *grads, None, dstate if dstate.numel() else None, None, None, None


def portable(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu: torch.Tensor,
    state: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    l2norm: bool = True,
    keep_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return Portable.apply(q, k, v, g, beta, cu, state, scale, l2norm, keep_state)


def far(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()
