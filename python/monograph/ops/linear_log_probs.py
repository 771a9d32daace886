"""monograph::linear_log_probs: what trainers ask of a language model's head, without the matrix of logits.

    z            = scale * (x W^T + bias), then softcap * tanh(z / softcap) if softcap > 0;  p = softmax(z)
    log_probs    = log p[label]         differentiable
    entropy      = -sum p log p         differentiable; its gradient computes the logits again
    log_sum_sq   = log sum p^2
    mean_logits  = mean z
    is_top1      whether the label is the most likely token, the first of several

One number per token, all 0 where the label is -100: such a token is not computed. As in
`linear_cross_entropy` the gradient of log_probs is taken while the logits exist, and a plain weight that is
trained gets its own.

Not differentiable twice: a second derivative raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import register_flop_formula

from monograph.ops import library  # noqa: F401  (the schemas are registered there)
from monograph.ops.argument_checks import IGNORED, check_head, check_tensors, check_token_numbers, require
from monograph.ops.autograd import anchor, once, register_autograd, register_not_differentiable
from monograph.ops.layout import read_matrix
from monograph.ops.linear import as_rows, dense_weight
from monograph.ops.linear_cross_entropy import (
    PORTABLE_LOGITS,
    check_dw,
    mapped_logits,
    register_head,
    sliced_weight_gradient,
)


class TokenLogProbs(NamedTuple):
    log_probs: torch.Tensor
    entropy: torch.Tensor
    log_sum_sq_probs: torch.Tensor
    mean_logits: torch.Tensor
    is_top1: torch.Tensor


def linear_log_probs(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: Sequence[torch.Tensor],
    layout: Sequence[int],
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    softcap: float = 0.0,
    scale: float = 1.0,
) -> TokenLogProbs:
    """For each token of x [..., K], float32 (is_top1: bool) [...]; labels int64 [...], -100 for none.

    The weight [V, K] is packed or, with layout [0, 0, V, K], plain: see `monograph.ops.linear`.
    """
    need_dx = torch.is_grad_enabled() and x.requires_grad
    found = torch.ops.monograph.linear_log_probs(
        x, values, scales, layout, bias, labels, softcap, scale, need_dx
    )
    return TokenLogProbs(*(each.reshape(labels.shape) for each in found[:5]))


def portable_linear_log_probs(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: Sequence[torch.Tensor],
    layout: Sequence[int],
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    softcap: float,
    scale: float,
    need_dx: bool,
) -> tuple[torch.Tensor, ...]:
    """The operator in aten operations, for any device."""
    op = "linear_log_probs"
    check_tensors(op, x=x, values=values, scales=scales, bias=bias, labels=labels)
    check_head(op, x, values, scales, layout, bias, labels, softcap, scale)
    loss, lse, dx = torch.ops.monograph.linear_cross_entropy(
        x, values, scales, layout, bias, labels, softcap, scale, need_dx
    )
    dense = dense_weight(values, scales, layout, x.dtype)
    rows, targets = as_rows(x), labels.reshape(-1)
    chunk = max(1, PORTABLE_LOGITS // max(dense.shape[0], 1))
    parts: list[list[torch.Tensor]] = [[lse[:0]], [lse[:0]], [lse[:0]], [targets[:0] == 0]]
    for begin in range(0, rows.shape[0], chunk):
        label = targets[begin : begin + chunk]
        counts = label != IGNORED
        z, _ = mapped_logits(
            torch.nn.functional.linear(rows[begin : begin + chunk], dense, bias), softcap, scale
        )
        log_p = torch.log_softmax(z, dim=1)
        entropy = -torch.xlogy(log_p.exp(), log_p.exp()).sum(1)
        top = (z.argmax(1) == label) & ~z.isnan().any(1)  # torch takes NaN for the largest
        for part, value in zip(parts, (entropy, torch.logsumexp(2 * log_p, 1), z.mean(1), top), strict=True):
            part.append(torch.where(counts, value, torch.zeros_like(value)))
    entropy, squares, mean = (torch.cat(part).float() for part in parts[:3])
    return -loss, entropy, squares, mean, torch.cat(parts[3]), lse, dx


def portable_linear_entropy_dx(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: Sequence[torch.Tensor],
    layout: Sequence[int],
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    lse: torch.Tensor,
    entropy: torch.Tensor,
    g: torch.Tensor,
    softcap: float,
    scale: float,
) -> torch.Tensor:
    """The gradient of the entropy in aten operations."""
    op = "linear_entropy_dx"
    vectors = {"lse": lse, "entropy": entropy, "g": g}
    check_tensors(op, x=x, values=values, scales=scales, bias=bias, labels=labels, **vectors)
    check_head(op, x, values, scales, layout, bias, labels, softcap, scale)
    check_token_numbers(op, labels.numel(), **vectors)
    dense = dense_weight(values, scales, layout, x.dtype)
    rows = as_rows(x)
    factor = torch.where(labels.reshape(-1) == IGNORED, 0.0, g.reshape(-1))
    chunk = max(1, PORTABLE_LOGITS // max(dense.shape[0], 1))
    found = [rows[:0]]
    for begin in range(0, rows.shape[0], chunk):
        part = slice(begin, begin + chunk)
        z, slope = mapped_logits(torch.nn.functional.linear(rows[part], dense, bias), softcap, scale)
        log_p = z - lse[part, None]
        dz = -log_p.exp() * (log_p + entropy[part, None]) * slope * factor[part, None]
        found.append(torch.nan_to_num(dz).to(x.dtype) @ dense)
    return torch.cat(found).reshape(x.shape)


def linear_entropy_dw(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    lse: torch.Tensor,
    entropy: torch.Tensor,
    g: torch.Tensor,
    softcap: float,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The entropy's gradient of a plain weight and its bias, in aten operations on every device.

    Tokens whose g is 0 are left out: a graph that never uses the entropy hands over zeros, and pays nothing.
    """
    check_dw("linear_entropy_dw", x, weight, bias, labels, softcap, scale, lse=lse, entropy=entropy, g=g)
    keep = ((labels.reshape(-1) != IGNORED) & (g.reshape(-1) != 0)).nonzero()[:, 0]
    lse, entropy, g = lse[keep, None], entropy[keep, None], g[keep, None]

    def dz(z: torch.Tensor, slope: torch.Tensor | float, part: slice) -> torch.Tensor:
        log_p = z - lse
        return torch.nan_to_num(-log_p.exp() * (log_p + entropy) * slope * g)

    return sliced_weight_gradient(as_rows(x)[keep], weight, bias, softcap, scale, dz)


@torch.library.register_fake("monograph::linear_log_probs")
def _(x, values, scales, layout, bias, labels, softcap, scale, need_dx):  # type: ignore[no-untyped-def]
    check_tensors("linear_log_probs", x=x, values=values, scales=scales, bias=bias, labels=labels)
    numbers = [x.new_empty([labels.numel()], dtype=torch.float32) for _ in range(5)]
    top = x.new_empty([labels.numel()], dtype=torch.bool)
    dx = x.new_empty(list(x.shape) if need_dx else [0])
    return *numbers[:4], top, numbers[4], dx


@torch.library.register_fake("monograph::linear_entropy_dx")
def _(x, values, scales, layout, bias, labels, lse, entropy, g, softcap, scale):  # type: ignore[no-untyped-def]
    rest = {"bias": bias, "labels": labels, "lse": lse, "entropy": entropy, "g": g}
    check_tensors("linear_entropy_dx", x=x, values=values, scales=scales, **rest)
    return x.new_empty(list(x.shape))


@torch.library.register_fake("monograph::linear_entropy_dw")
def _(x, weight, bias, labels, lse, entropy, g, softcap, scale):  # type: ignore[no-untyped-def]
    rest = {"bias": bias, "labels": labels, "lse": lse, "entropy": entropy, "g": g}
    check_tensors("linear_entropy_dw", x=x, weight=weight, **rest)
    require(weight.dim() == 2, "linear_entropy_dw", f"the weight has {weight.dim()} dimensions, wanted 2")
    dw = weight.new_empty(list(weight.shape), dtype=x.dtype)
    return dw, x.new_empty([0 if bias is None else weight.shape[0]], dtype=torch.float32)


torch.library.impl("monograph::linear_log_probs", "CompositeExplicitAutograd")(portable_linear_log_probs)
torch.library.impl("monograph::linear_entropy_dx", "CompositeExplicitAutograd")(portable_linear_entropy_dx)
torch.library.impl("monograph::linear_entropy_dw", "CompositeExplicitAutograd")(linear_entropy_dw)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, values, scales, layout, bias, labels, softcap, scale, need_dx = inputs
    _, entropy, squares, mean, top, lse, dx = output
    ctx.mark_non_differentiable(squares, mean, top, lse, dx)
    ctx.set_materialize_grads(False)
    ctx.anchor = anchor("linear_log_probs", x, values, bias)
    ctx.save_for_backward(x, values, bias, labels, entropy, lse, dx, *scales)
    ctx.layout, ctx.numbers, ctx.need_dx = layout, (softcap, scale), need_dx


def _backward(ctx: Any, g: torch.Tensor | None, g_entropy: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
    x, values, bias, labels, entropy, lse, dx, *scales = ctx.saved_tensors
    needs = ctx.needs_input_grad
    grad_x = dvalues = dbias = None
    trained = needs[1] or (bias is not None and needs[4])
    if trained and len(scales) > 0:
        raise RuntimeError("linear_log_probs: the bias of a packed weight cannot be trained")
    if needs[0] and g is not None:
        if not ctx.need_dx:
            raise RuntimeError("linear_log_probs: x wants a gradient, but the call had need_dx=False")
        grad_x = once(ctx.anchor, (dx * -g.reshape(dx.shape[:-1]).unsqueeze(-1)).to(dx.dtype))
    if needs[0] and g_entropy is not None:
        more = torch.ops.monograph.linear_entropy_dx(
            x, values, scales, ctx.layout, bias, labels, lse, entropy, g_entropy.float(), *ctx.numbers
        )
        grad_x = more if grad_x is None else grad_x + more
    if trained:
        head = (x, values.reshape(read_matrix("linear_log_probs", ctx.layout).shape), bias, labels, lse)
        parts = []
        if g is not None:
            parts.append(torch.ops.monograph.linear_cross_entropy_dw(*head, -g.float(), *ctx.numbers))
        if g_entropy is not None:
            parts.append(
                torch.ops.monograph.linear_entropy_dw(*head, entropy, g_entropy.float(), *ctx.numbers)
            )
        if parts and needs[1]:
            dvalues = sum(dw for dw, _ in parts).to(values.dtype).reshape(values.shape)
        if parts and bias is not None and needs[4]:
            dbias = sum(db for _, db in parts).to(bias.dtype)
    return grad_x, dvalues, [None] * len(scales), None, dbias, None, None, None, None


register_autograd("linear_log_probs", _backward, _setup_context)
register_not_differentiable("linear_entropy_dx")
register_not_differentiable("linear_entropy_dw")


register_head("linear_log_probs")


@register_flop_formula(torch.ops.monograph.linear_entropy_dx)
def _entropy_flops(x, values, scales, layout, *rest, **_):  # type: ignore[no-untyped-def]
    return 4 * prod(x[:-1]) * prod(read_matrix("linear_entropy_dx", layout).shape)
