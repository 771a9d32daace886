"""monograph::rotary: rotary positions of queries and keys, after the norm of their heads (Qwen3, Gemma 3).

    y = round(v cos) + round(r(v) sin)      v = x, or rms_norm(x, weight) head by head

r turns pairs (a, b) into (-b, a): element i with i + rotated / 2, or with interleaved=True 2 i with 2 i + 1.
cos and sin [batch or 1, tokens, rotated] come as transformers hands them over; elements of a head beyond
`rotated` pass. Rounded where apply_rotary_pos_emb rounds. Saved are cos and sin, and with a norm q and k. cos
and sin have no gradient; a second derivative raises. Under autocast all are taken in their widest dtype.
"""

from __future__ import annotations

from typing import Any

import torch

from monograph.ops import library  # noqa: F401  (the schemas are registered there)
from monograph.ops.argument_checks import (
    check_float,
    check_number,
    check_optional_tensors,
    check_shape,
    check_tensors,
    dtype_name,
    require,
)
from monograph.ops.autocast import autocast_rule, widest, without_autocast
from monograph.ops.autograd import register_autograd, register_not_differentiable
from monograph.ops.rms_norm import norm_gradient, normed_rows

_LARGEST_HEAD = 1024  # as in core/monograph/kernels/rotary/rotary.h


def rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    one_plus_weight: bool = False,
    round_before_weight: bool = True,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [batch, tokens, heads, size] and k [batch, tokens, key heads, size] at their positions."""
    return torch.ops.monograph.rotary(
        q, k, cos, sin, q_weight, k_weight, eps, one_plus_weight, round_before_weight, interleaved
    )


def _check(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weights: tuple[torch.Tensor | None, torch.Tensor | None],
    eps: float,
    round_before_weight: bool,
) -> None:
    check_tensors(op, q=q, k=k, cos=cos, sin=sin)
    check_optional_tensors(op, q, q_weight=weights[0], k_weight=weights[1])
    for what, t in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        check_float(op, what, t, q.dtype)
    for what, t, weight in (("q", q, weights[0]), ("k", k, weights[1])):
        require(t.dim() == 4, op, f"{what} has {t.dim()} dimensions, wanted [batch, tokens, heads, size]")
        require(
            t.shape[:2] == q.shape[:2], op, f"{what} has {list(t.shape[:2])} tokens, q {list(q.shape[:2])}"
        )
        if weight is not None:
            check_float(op, f"the weight of {what}", weight, q.dtype if round_before_weight else None)
            check_shape(op, f"the weight of {what}", weight, [t.shape[3]])
    for what, t in (("cos", cos), ("sin", sin)):
        fits = t.dim() == 3 and t.shape[0] in (1, q.shape[0]) and t.shape[1] == q.shape[1]
        wanted = f"[{q.shape[0]} or 1, {q.shape[1]}, rotated]"
        require(fits, op, f"{what} has shape {list(t.shape)}, wanted {wanted}")
    check_shape(op, "sin", sin, cos.shape)
    rotated = cos.shape[2]
    require(rotated > 0 and rotated % 2 == 0, op, f"cos has {rotated} columns, wanted an even number above 0")
    for what, t in (("q", q), ("k", k)):
        size = t.shape[3]
        require(
            size >= rotated, op, f"{what} has heads of {size}, wanted the {rotated} columns of cos or more"
        )
        require(size <= _LARGEST_HEAD, op, f"{what} has heads of {size}, wanted {_LARGEST_HEAD} at most")
    check_number(op, "eps", eps)


def _rotate_half(v: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Pairs (a, b) into (-b, a)."""
    if interleaved:
        return torch.stack((-v[..., 1::2], v[..., ::2]), dim=-1).flatten(-2)
    a, b = v.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def portable_rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    one_plus_weight: bool,
    round_before_weight: bool,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator in aten operations, for any device."""
    _check("rotary", q, k, cos, sin, (q_weight, k_weight), eps, round_before_weight)
    c, s, rotated = cos[:, :, None], sin[:, :, None], cos.shape[2]
    outs = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        v = x if weight is None else normed_rows(x, weight, eps, one_plus_weight, round_before_weight)
        head = v[..., :rotated]
        y = head * c + _rotate_half(head, interleaved) * s
        outs.append(torch.cat((y, v[..., rotated:]), dim=-1))
    return outs[0], outs[1]


def portable_rotary_backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    one_plus_weight: bool,
    round_before_weight: bool,
    interleaved: bool,
    need_dweight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients in aten operations."""
    op = "rotary_backward"
    _check(op, dq, dk, cos, sin, (q_weight, k_weight), eps, round_before_weight)
    wide = torch.promote_types(dq.dtype, torch.float32)
    c, s, rotated = cos[:, :, None].to(wide), sin[:, :, None].to(wide), cos.shape[2]
    gradients, weights = [], []
    for what, dy, x, weight in (("q", dq, q, q_weight), ("k", dk, k, k_weight)):
        d = dy.to(wide)
        head = d[..., :rotated]
        g = torch.cat((head * c - _rotate_half(head * s, interleaved), d[..., rotated:]), dim=-1)
        dweight = g.new_empty(0)
        if weight is not None:
            if x is None:
                raise ValueError(f"{op}: the norm of {what} has a weight, but its input is None")
            check_optional_tensors(op, dq, **{what: x})
            check_float(op, what, x, dy.dtype)
            check_shape(op, what, x, dy.shape)
            options = (eps, one_plus_weight, round_before_weight)
            g, terms = norm_gradient(g, x, weight, *options)
            dweight = terms.reshape(-1, dy.shape[-1]).sum(0) if need_dweight else dweight
        gradients.append(g.to(dy.dtype).contiguous())
        weights.append(dweight)
    return gradients[0], gradients[1], weights[0], weights[1]


@torch.library.register_fake("monograph::rotary")
def _(q, k, cos, sin, q_weight, k_weight, *rest):  # type: ignore[no-untyped-def]
    check_tensors("rotary", q=q, k=k, cos=cos, sin=sin)
    check_optional_tensors("rotary", q, q_weight=q_weight, k_weight=k_weight)
    for what, t, weight in (("q_weight", q, q_weight), ("k_weight", k, k_weight)):
        if weight is not None and t.dim() > 0:
            check_shape("rotary", what, weight, [t.shape[-1]])
    return q.new_empty(list(q.shape)), k.new_empty(list(k.shape))


@torch.library.register_fake("monograph::rotary_backward")
def _(dq, dk, q, k, cos, sin, q_weight, k_weight, *rest):  # type: ignore[no-untyped-def]
    op, wide = "rotary_backward", {"dtype": torch.promote_types(dq.dtype, torch.float32)}
    check_tensors(op, dq=dq, dk=dk, cos=cos, sin=sin)
    check_optional_tensors(op, dq, q=q, k=k, q_weight=q_weight, k_weight=k_weight)
    require(dq.dim() == 4 and dk.dim() == 4, op, f"dq is {dtype_name(dq.dtype)}, wanted four dimensions")
    sizes = [t.shape[3] if rest[-1] and w is not None else 0 for t, w in ((dq, q_weight), (dk, k_weight))]
    outs = (t.new_empty(list(t.shape)) for t in (dq, dk))
    return (*outs, *(dq.new_empty([size], **wide) for size in sizes))


torch.library.impl("monograph::rotary", "CompositeExplicitAutograd")(portable_rotary)
torch.library.impl("monograph::rotary_backward", "CompositeExplicitAutograd")(portable_rotary_backward)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, cos, sin, q_weight, k_weight, *ctx.options = inputs
    for what, t in (("cos", cos), ("sin", sin)):
        if t.requires_grad:
            raise ValueError(f"rotary: {what} requires a gradient, wanted a constant")
    saved = (q if q_weight is not None else None, k if k_weight is not None else None)
    ctx.save_for_backward(*saved, cos, sin, q_weight, k_weight)


def _backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # read once: checkpointing gives them out once
    q_weight, k_weight = saved[4:]
    needs = ctx.needs_input_grad[4:6]
    dq, dk, *dweights = torch.ops.monograph.rotary_backward(dq, dk, *saved, *ctx.options, any(needs))
    of_weights = (
        d.to(w.dtype) if need and w is not None else None
        for d, w, need in zip(dweights, (q_weight, k_weight), needs, strict=True)
    )
    return dq, dk, None, None, *of_weights, None, None, None, None


register_autograd("rotary", _backward, _setup_context)
register_not_differentiable("rotary_backward")


@autocast_rule("rotary")
def _autocast(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    cast = widest(q, k, cos, sin, q_weight, k_weight)
    with without_autocast(q):
        return torch.ops.monograph.rotary(*cast, *options)
