"""monograph::varlen_attention: attention over documents packed in one row, with backward.

Document d owns the query rows [cu_q[d], cu_q[d + 1]) and the key rows [cu_k[d], cu_k[d + 1]), of which the
first key_lengths[d] count. Offsets are int32 tensors of fixed length, padded with the number of tokens, so no
shape and no Python number changes between batches. Rows outside every document give 0. A second derivative
raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from monograph import _library  # noqa: F401  (the schemas are registered there)
from monograph.ops.argument_checks import (
    check_float,
    check_number,
    check_shape,
    check_tensors,
    dtype_name,
    require,
)
from monograph.ops.autocast import cast
from monograph.ops.autograd import register_autograd, register_not_differentiable
from monograph.ops.documents import check_offsets, document_of


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor | None = None,
    *,
    causal: bool = True,
    window: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    key_lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of q [tokens, heads, size] over k and v [key tokens, key heads, size], document by document.

    Causal is aligned at the bottom right: the last query of a document sees its last key. `window` counts the
    keys seen to the left, the query's own position included (0: all); `sinks` holds one learned logit per
    head, in float32; `softcap` c turns a score s into c tanh(s / c).
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    cu_k = cu_q if cu_k is None else cu_k
    out, _ = torch.ops.monograph.varlen_attention(
        q, k, v, cu_q, cu_k, key_lengths, sinks, causal, window, scale, softcap
    )
    return out


def _visible(
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    key_lengths: torch.Tensor | None,
    sizes: tuple[int, int],
    causal: bool,
    window: int,
) -> torch.Tensor:
    """[query tokens, key tokens], True where a query sees a key."""
    count = cu_q.numel() - 1
    doc_q, doc_k = document_of(cu_q, sizes[0]), document_of(cu_k, sizes[1])
    if key_lengths is None:
        key_lengths = cu_k[1:] - cu_k[:-1]
    inside_q, inside_k = doc_q.clamp(0, max(count - 1, 0)), doc_k.clamp(0, max(count - 1, 0))
    place_k = torch.arange(sizes[1], device=cu_k.device) - cu_k[inside_k]
    query_lengths = cu_q[1:] - cu_q[:-1]
    place_q = torch.arange(sizes[0], device=cu_q.device) - cu_q[inside_q]
    place_q = place_q + (key_lengths - query_lengths)[inside_q]
    valid_q, valid_k = (doc_q >= 0) & (doc_q < count), (doc_k >= 0) & (doc_k < count)
    seen = (doc_q[:, None] == doc_k[None, :]) & valid_q[:, None] & valid_k[None, :]
    seen = seen & (place_k < key_lengths[inside_k])[None, :]
    distance = place_q[:, None] - place_k[None, :]
    if causal:
        seen = seen & (distance >= 0)
    if window > 0:
        seen = seen & (distance.abs() < window)
    return seen


def _check_arguments(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    key_lengths: torch.Tensor | None,
    sinks: torch.Tensor | None,
    window: int,
    scale: float,
    softcap: float,
) -> None:
    check_tensors(op, q=q, k=k, v=v, cu_q=cu_q, cu_k=cu_k, key_lengths=key_lengths, sinks=sinks)
    for what, t in (("q", q), ("k", k), ("v", v)):
        check_float(op, what, t, q.dtype)
        require(t.dim() == 3, op, f"{what} has {t.dim()} dimensions, wanted [tokens, heads, size]")
    heads, kv_heads = q.shape[1], k.shape[1]
    check_shape(op, "v", v, [*k.shape[:2], v.shape[2]])
    require(q.shape[2] == k.shape[2], op, f"q has heads of {q.shape[2]}, k of {k.shape[2]}")
    whole = heads > 0 and kv_heads > 0 and heads % kv_heads == 0
    require(whole, op, f"{heads} query heads are no multiple of {kv_heads} key heads")
    for size in (q.shape[2], v.shape[2]):
        require(1 <= size <= 512, op, f"head size {size}, wanted 1 to 512")
    require(window >= 0, op, f"window is {window}, wanted 0 for none or more")
    check_number(op, "scale", scale)
    check_number(op, "softcap", softcap)
    if sinks is not None:
        check_float(op, "sinks", sinks)
        check_shape(op, "sinks", sinks, [heads])
    require(cu_q.numel() >= 1, op, "cu_q is empty, wanted at least one offset")
    check_offsets(op, "cu_q", cu_q, q.shape[0])
    check_offsets(op, "cu_k", cu_k, k.shape[0])
    check_shape(op, "cu_k", cu_k, cu_q.shape)
    if key_lengths is not None:
        check_shape(op, "key_lengths", key_lengths, [cu_q.numel() - 1])
        found = dtype_name(key_lengths.dtype)
        require(key_lengths.dtype == torch.int32, op, f"key_lengths has dtype {found}, wanted int32")
        room = cu_k[1:] - cu_k[:-1]
        inside = bool(((key_lengths >= 0) & (key_lengths <= room)).all())
        require(inside, op, f"key_lengths is {key_lengths.tolist()}, the documents have {room.tolist()} keys")


def portable_varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    key_lengths: torch.Tensor | None,
    sinks: torch.Tensor | None,
    causal: bool,
    window: int,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator in aten operations, for any device. Builds the whole score matrix: right, not lean."""
    op = "varlen_attention"
    _check_arguments(op, q, k, v, cu_q, cu_k, key_lengths, sinks, window, scale, softcap)
    group = q.shape[1] // k.shape[1]
    kind = torch.float64 if q.dtype == torch.float64 else torch.float32
    queries, keys, values = (t.transpose(0, 1).to(kind) for t in (q, k, v))
    scores = scale * queries @ keys.repeat_interleave(group, 0).transpose(1, 2)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    seen = _visible(cu_q, cu_k, key_lengths, (q.shape[0], k.shape[0]), causal, window)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.to(kind)[:, None, None].expand(-1, q.shape[0], 1)
        scores = torch.cat((scores, column), dim=2)
    lse = torch.logsumexp(scores, dim=2)
    weights = torch.exp(scores - lse.masked_fill(lse.isinf(), 0.0)[..., None])[..., : k.shape[0]]
    weights = torch.where(seen, weights, 0.0)  # also where the row's lse is NaN, and for its gradient
    # 0 times the NaN of another document would be NaN: only rows that see such a value take it.
    values = values.repeat_interleave(group, 0)
    finite = values.isfinite()
    out = weights @ torch.where(finite, values, 0.0)
    poisoned = seen.to(kind) @ (~finite).to(kind) > 0
    out = out.masked_fill(poisoned, float("nan"))
    document = document_of(cu_q, q.shape[0])
    inside = (document >= 0) & (document < cu_q.numel() - 1)
    lse = torch.where(inside[None, :], lse, 0.0)
    out = torch.where(inside[None, :, None], out, 0.0)
    return out.transpose(0, 1).to(q.dtype).contiguous(), lse.float()


def _finite(t: torch.Tensor) -> torch.Tensor:
    return torch.where(t.isfinite(), t, 0.0)


def _reached(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where dq, dk and dv meet a NaN or an infinity; as wide as a head, or one element for all of it."""
    group = q.shape[1] // k.shape[1]
    pairs = seen.float()
    bad_q, bad_k, bad_v = ((~t.isfinite()).any(dim=2).T for t in (q, k, v))  # [heads, tokens]
    bad_k, bad_v = (t.repeat_interleave(group, 0).float() for t in (bad_k, bad_v))
    bad_dout = (~dout.isfinite()).transpose(0, 1)
    scores = (bad_q & seen.any(dim=1)) | (bad_k @ pairs.T > 0)
    rows = scores | (bad_dout.any(dim=2) & seen.any(dim=1)) | (bad_v @ pairs.T > 0)
    values = (scores[..., None] | bad_dout).float()

    def of_keys(marked: torch.Tensor) -> torch.Tensor:
        """[heads, queries, n] to [keys, key heads, n]."""
        met = pairs.T @ marked > 0
        return met.unflatten(0, (-1, group)).any(dim=1).transpose(0, 1)

    return rows.T[..., None], of_keys(rows[..., None].float()), of_keys(values)


def portable_varlen_attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    key_lengths: torch.Tensor | None,
    sinks: torch.Tensor | None,
    causal: bool,
    window: int,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients in aten operations: autograd through the portable forward.

    On values without NaN and infinities; what those reach, pair by pair that sees each other, is NaN.
    """
    op = "varlen_attention_backward"
    check_tensors(op, q=q, dout=dout, out=out, lse=lse)
    _check_arguments(op, q, k, v, cu_q, cu_k, key_lengths, sinks, window, scale, softcap)
    for what, t in (("out", out), ("dout", dout)):
        check_float(op, what, t, q.dtype)
        check_shape(op, what, t, [*q.shape[:2], v.shape[2]])
    check_float(op, "lse", lse, torch.float32)
    check_shape(op, "lse", lse, [q.shape[1], q.shape[0]])
    qf, kf, vf = (_finite(t.detach().float()).requires_grad_() for t in (q, k, v))
    sink = None if sinks is None else sinks.detach().requires_grad_()
    with torch.enable_grad():
        result, _ = portable_varlen_attention(
            qf, kf, vf, cu_q, cu_k, key_lengths, sink, causal, window, scale, softcap
        )
    inputs = [qf, kf, vf] if sink is None else [qf, kf, vf, sink]
    grads = torch.autograd.grad(result, inputs, _finite(dout.float()), allow_unused=True)
    seen = _visible(cu_q, cu_k, key_lengths, (q.shape[0], k.shape[0]), causal, window)
    reached = _reached(dout, q, k, v, seen)
    dq, dk, dv = (
        (torch.zeros_like(t) if g is None else g.to(t.dtype)).masked_fill(nan, float("nan"))
        for g, t, nan in zip(grads, (q, k, v), reached, strict=False)
    )
    if sink is None:
        return dq, dk, dv, q.new_zeros(0, dtype=torch.float32)
    return dq, dk, dv, grads[3].masked_fill(reached[0].any(dim=0)[:, 0], float("nan"))


@torch.library.register_fake("monograph::varlen_attention")
def _(q, k, v, cu_q, cu_k, key_lengths, sinks, causal, window, scale, softcap):  # type: ignore[no-untyped-def]
    op = "varlen_attention"
    check_tensors(op, q=q, k=k, v=v, cu_q=cu_q, cu_k=cu_k, key_lengths=key_lengths, sinks=sinks)
    for what, t in (("q", q), ("k", k), ("v", v)):
        require(t.dim() == 3, op, f"{what} has {t.dim()} dimensions, wanted [tokens, heads, size]")
    out = q.new_empty([q.shape[0], q.shape[1], v.shape[2]])
    return out, q.new_empty([q.shape[1], q.shape[0]], dtype=torch.float32)


@torch.library.register_fake("monograph::varlen_attention_backward")
def _(dout, q, k, v, out, lse, cu_q, cu_k, key_lengths, sinks, *rest):  # type: ignore[no-untyped-def]
    more = {"lse": lse, "cu_q": cu_q, "cu_k": cu_k, "key_lengths": key_lengths, "sinks": sinks}
    check_tensors("varlen_attention_backward", q=q, dout=dout, k=k, v=v, out=out, **more)
    require(q.dim() == 3, "varlen_attention_backward", f"q has {q.dim()} dimensions, wanted 3")
    dsinks = q.new_empty([0 if sinks is None else q.shape[1]], dtype=torch.float32)
    return (*(t.new_empty(list(t.shape)) for t in (q, k, v)), dsinks)


torch.library.impl("monograph::varlen_attention", "CompositeExplicitAutograd")(portable_varlen_attention)
torch.library.impl("monograph::varlen_attention_backward", "CompositeExplicitAutograd")(
    portable_varlen_attention_backward
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, cu_q, cu_k, key_lengths, sinks, *ctx.options = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k, key_lengths, sinks)
    ctx.mark_non_differentiable(lse)


def _backward(ctx: Any, dout: torch.Tensor, _: Any) -> tuple[Any, ...]:
    *tensors, sinks = ctx.saved_tensors
    dq, dk, dv, dsinks = torch.ops.monograph.varlen_attention_backward(dout, *tensors, sinks, *ctx.options)
    return dq, dk, dv, None, None, None, None if sinks is None else dsinks, None, None, None, None


register_autograd("varlen_attention", _backward, _setup_context)
register_not_differentiable("varlen_attention_backward")


@torch.library.impl("monograph::varlen_attention", "AutocastCPU")
def _autocast(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """As torch treats its own attention: a rotary embedding in float32 leaves q and k wider than v."""
    q, k, v = (cast(t) for t in (q, k, v))
    with torch.amp.autocast("cpu", enabled=False):
        return torch.ops.monograph.varlen_attention(q, k, v, cu_q, cu_k, *rest)


@register_flop_formula(torch.ops.monograph.varlen_attention)
def _flops(q, k, v, cu_q, *rest, out_shape=None, **_):  # type: ignore[no-untyped-def]
    """As for one document of average length: shapes do not tell where documents end."""
    documents = max(cu_q[0] - 1, 1)
    return 2 * q[0] * k[0] * q[1] * (q[2] + v[2]) // (2 * documents)


@register_flop_formula(torch.ops.monograph.varlen_attention_backward)
def _backward_flops(dout, q, k, v, out, lse, cu_q, *rest, out_shape=None, **_):  # type: ignore[no-untyped-def]
    documents = max(cu_q[0] - 1, 1)
    return 2 * q[0] * k[0] * q[1] * (3 * q[2] + 2 * v[2]) // (2 * documents)
