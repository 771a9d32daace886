"""monograph::linear_cross_entropy: the loss of a language model's head, without the matrix of logits.

    z    = scale * (x W^T + bias), then softcap * tanh(z / softcap) if softcap > 0
    loss = logsumexp(z) - z[label]      one number per token; 0 where the label is -100

The loss of a token depends on its own x alone, so the forward computes dx too, while the logits of a chunk of
tokens exist, and backward is one product with the incoming gradient. Tokens without a label are not computed.
A plain weight that is trained gets its gradient from a second operator, which computes the logits again.

Not differentiable twice: a second derivative raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from monograph.ops import library  # noqa: F401  (the schemas are registered there)
from monograph.ops.argument_checks import IGNORED as IGNORED
from monograph.ops.argument_checks import (
    check_head,
    check_tensors,
    check_token_numbers,
    require,
)
from monograph.ops.autocast import autocast_rule, cast, without_autocast
from monograph.ops.autograd import anchor, once, register_autograd, register_not_differentiable
from monograph.ops.layout import plain_layout, read_matrix
from monograph.ops.linear import as_rows, dense_weight

# Logits of the portable implementation that exist at a time.
PORTABLE_LOGITS = 1 << 24


def linear_cross_entropy(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: Sequence[torch.Tensor],
    layout: Sequence[int],
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    softcap: float = 0.0,
    scale: float = 1.0,
) -> torch.Tensor:
    """The loss of each token of x [..., K], float32 [...]; labels int64 [...], -100 for none.

    The weight [V, K] is packed or, with layout [0, 0, V, K], plain: see `monograph.ops.linear`.
    """
    need_dx = torch.is_grad_enabled() and x.requires_grad
    loss, _, _ = torch.ops.monograph.linear_cross_entropy(
        x, values, scales, layout, bias, labels, softcap, scale, need_dx
    )
    return loss.reshape(labels.shape)


def mapped_logits(
    logits: torch.Tensor, softcap: float, scale: float
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """z in float32 or float64, and dz/dlogit."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    if softcap == 0:
        return z, scale
    t = torch.tanh(z / softcap)
    return softcap * t, scale * (1 - t * t)


def portable_linear_cross_entropy(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: Sequence[torch.Tensor],
    layout: Sequence[int],
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    softcap: float,
    scale: float,
    need_dx: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operator in aten operations, for any device: a chunk of tokens at a time."""
    op = "linear_cross_entropy"
    check_tensors(op, x=x, values=values, scales=scales, bias=bias, labels=labels)
    check_head(op, x, values, scales, layout, bias, labels, softcap, scale)
    dense = dense_weight(values, scales, layout, x.dtype)
    rows, targets = as_rows(x), labels.reshape(-1)
    kind = torch.promote_types(x.dtype, torch.float32)
    losses, sums, gradients = [rows.new_zeros(0, dtype=kind)], [rows.new_zeros(0, dtype=kind)], [rows[:0]]
    chunk = max(1, PORTABLE_LOGITS // max(dense.shape[0], 1))
    for begin in range(0, rows.shape[0], chunk):
        part, label = rows[begin : begin + chunk], targets[begin : begin + chunk, None]
        counts = label != IGNORED
        z, slope = mapped_logits(torch.nn.functional.linear(part, dense, bias), softcap, scale)
        # As log_softmax: an infinite logit gives NaN, not an infinite sum.
        peak = z.max(dim=1, keepdim=True).values
        log_sum = (z - peak).exp().sum(dim=1, keepdim=True).log()
        own = z.gather(1, label.clamp(min=0))
        losses.append(torch.where(counts, log_sum + (peak - own), 0.0)[:, 0])
        sums.append(torch.where(counts, log_sum + peak, 0.0)[:, 0])
        if need_dx:
            p = (z - peak - log_sum).exp()
            p = p.scatter_add(1, label.clamp(min=0), -torch.ones_like(own)) * slope
            gradients.append(torch.where(counts, p, 0.0).to(x.dtype) @ dense)
    dx = torch.cat(gradients).reshape(x.shape) if need_dx else x.new_empty(0)
    return torch.cat(losses).float(), torch.cat(sums).float(), dx


def portable_linear_cross_entropy_dw(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    lse: torch.Tensor,
    g: torch.Tensor,
    softcap: float,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the weight in aten operations."""
    check_dw("linear_cross_entropy_dw", x, weight, bias, labels, softcap, scale, lse=lse, g=g)
    keep = (labels.reshape(-1) != IGNORED).nonzero()[:, 0]
    targets, lse, g = labels.reshape(-1)[keep], lse[keep, None], g[keep, None]

    def dz(z: torch.Tensor, slope: torch.Tensor | float, part: slice) -> torch.Tensor:
        own = targets[:, None] == torch.arange(part.start, part.stop, device=x.device)
        return ((z - lse).exp() - own.to(z.dtype)) * slope * g

    return sliced_weight_gradient(as_rows(x)[keep], weight, bias, softcap, scale, dz)


def check_dw(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    softcap: float,
    scale: float,
    **vectors: torch.Tensor,
) -> None:
    """What the operators of a trained plain weight take."""
    check_tensors(op, x=x, weight=weight, bias=bias, labels=labels, **vectors)
    require(weight.dim() == 2, op, f"the weight has {weight.dim()} dimensions, wanted [rows, cols]")
    check_head(op, x, weight, [], plain_layout(weight.shape), bias, labels, softcap, scale)
    check_token_numbers(op, labels.numel(), **vectors)


def sliced_weight_gradient(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    softcap: float,
    scale: float,
    dz: Callable[[torch.Tensor, torch.Tensor | float, slice], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """dweight and dbias of a head from dz(z, dz/dlogit, slice of the vocabulary), a slice at a time."""
    dw = weight.new_empty(weight.shape, dtype=rows.dtype)
    dbias = weight.new_empty(0 if bias is None else weight.shape[0], dtype=torch.float32)
    size = max(1, PORTABLE_LOGITS // max(rows.shape[0], 1))
    for begin in range(0, weight.shape[0], size):
        part = slice(begin, min(begin + size, weight.shape[0]))
        logits = torch.nn.functional.linear(
            rows, weight[part].to(rows.dtype), None if bias is None else bias[part]
        )
        gradient = dz(*mapped_logits(logits, softcap, scale), part).to(rows.dtype)
        dw[part] = gradient.t() @ rows
        if bias is not None:
            dbias[part] = gradient.float().sum(0)
    return dw, dbias


@torch.library.register_fake("monograph::linear_cross_entropy")
def _(x, values, scales, layout, bias, labels, softcap, scale, need_dx):  # type: ignore[no-untyped-def]
    check_tensors("linear_cross_entropy", x=x, values=values, scales=scales, bias=bias, labels=labels)
    loss = x.new_empty([labels.numel()], dtype=torch.float32)
    return loss, torch.empty_like(loss), x.new_empty(list(x.shape) if need_dx else [0])


@torch.library.register_fake("monograph::linear_cross_entropy_dw")
def _(x, weight, bias, labels, lse, g, softcap, scale):  # type: ignore[no-untyped-def]
    check_tensors("linear_cross_entropy_dw", x=x, weight=weight, bias=bias, labels=labels, lse=lse, g=g)
    require(
        weight.dim() == 2, "linear_cross_entropy_dw", f"the weight has {weight.dim()} dimensions, wanted 2"
    )
    dw = weight.new_empty(list(weight.shape), dtype=x.dtype)
    return dw, x.new_empty([0 if bias is None else weight.shape[0]], dtype=torch.float32)


torch.library.impl("monograph::linear_cross_entropy", "CompositeExplicitAutograd")(
    portable_linear_cross_entropy
)
torch.library.impl("monograph::linear_cross_entropy_dw", "CompositeExplicitAutograd")(
    portable_linear_cross_entropy_dw
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, values, scales, layout, bias, labels, softcap, scale, need_dx = inputs
    _, lse, dx = output
    ctx.mark_non_differentiable(lse, dx)
    ctx.anchor = anchor("linear_cross_entropy", x, values, bias)
    trained = values.requires_grad or (bias is not None and bias.requires_grad)
    if trained:
        ctx.save_for_backward(dx, lse, x, values, bias, labels)
    else:
        ctx.save_for_backward(dx)
    ctx.trained, ctx.need_dx, ctx.numbers = trained, need_dx, (softcap, scale)
    ctx.packed, ctx.scale_count = len(scales) > 0, len(scales)
    ctx.shape = list(read_matrix("linear_cross_entropy", layout).shape)


def _backward(ctx: Any, g: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    dx, *rest = ctx.saved_tensors
    needs = ctx.needs_input_grad
    grad_x = dvalues = dbias = None
    if needs[0]:
        if not ctx.need_dx:
            raise RuntimeError("linear_cross_entropy: x wants a gradient, but the call had need_dx=False")
        grad_x = once(ctx.anchor, (dx * g.reshape(dx.shape[:-1]).unsqueeze(-1)).to(dx.dtype))
    if ctx.trained:
        if ctx.packed:
            raise RuntimeError("linear_cross_entropy: the bias of a packed weight cannot be trained")
        lse, x, values, bias, labels = rest
        dw, db = torch.ops.monograph.linear_cross_entropy_dw(
            x, values.reshape(ctx.shape), bias, labels, lse, g, *ctx.numbers
        )
        dvalues = dw.to(values.dtype).reshape(values.shape) if needs[1] else None
        dbias = db.to(bias.dtype) if bias is not None and needs[4] else None
    return grad_x, dvalues, [None] * ctx.scale_count, None, dbias, None, None, None, None


register_autograd("linear_cross_entropy", _backward, _setup_context)
register_not_differentiable("linear_cross_entropy_dw")


def register_head(name: str) -> None:
    """What the operators of a head that take (x, values, scales, layout, bias, ..., need_dx) share."""
    op = getattr(torch.ops.monograph, name)

    def in_autocast(
        x: torch.Tensor,
        values: torch.Tensor,
        scales: Sequence[torch.Tensor],
        layout: Sequence[int],
        bias: torch.Tensor | None,
        *rest: Any,
    ) -> tuple[torch.Tensor, ...]:
        x, bias = cast(x), cast(bias)
        with without_autocast(x):
            return op(x, values, scales, layout, bias, *rest)

    def flops(x, values, scales, layout, bias, labels, softcap, scale, need_dx, **_):  # type: ignore[no-untyped-def]
        """As if every token had a label: shapes do not tell."""
        return 2 * prod(x[:-1]) * prod(read_matrix(name, layout).shape) * (2 if need_dx else 1)

    autocast_rule(name)(in_autocast)
    register_flop_formula(op)(flops)


register_head("linear_cross_entropy")


@register_flop_formula(torch.ops.monograph.linear_cross_entropy_dw)
def _dw_flops(x, weight, *rest, **_):  # type: ignore[no-untyped-def]
    return 4 * prod(x[:-1]) * weight[0] * weight[1]
