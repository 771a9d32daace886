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

from monograph.ops import library  # noqa: F401  (the schemas are registered there)
from monograph.ops.argument_checks import (
    check_float,
    check_number,
    check_shape,
    check_tensors,
    dtype_name,
    require,
    require_on_device,
)
from monograph.ops.attention_choice import OTHERWISE, Asked, attention_provider
from monograph.ops.autocast import autocast_rule, cast, without_autocast
from monograph.ops.autograd import register_autograd, register_not_differentiable
from monograph.ops.documents import check_offsets, document_of
from monograph.ops.offload_marks import mark_attention
from monograph.ops.providers import serve


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

    On CUDA flash attention computes it, torch's or flash-attn's, and what it cannot do is a ValueError
    (attention_choice.py).
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    cu_k = cu_q if cu_k is None else cu_k
    if q.device.type not in ("cpu", "meta"):
        if torch.amp.is_autocast_available(q.device.type) and torch.is_autocast_enabled(q.device.type):
            q, k, v = (cast(t) for t in (q, k, v))
        tokens, slots = q.shape[0], cu_q.shape[0] - 1
        asked = Asked(q.dtype, q.shape[-1], v.shape[-1], softcap, sinks is not None, scale, tokens, slots)
        attention_provider(q.device, asked)  # refuses here what a graph would refuse when it runs
    out, _ = torch.ops.monograph.varlen_attention(
        q, k, v, cu_q, cu_k, key_lengths, sinks, causal, window, scale, softcap
    )
    return out


# Scores of the portable implementation that exist at a time, of all heads.
PORTABLE_SCORES = 1 << 22


class _Sight:
    """Who sees whom: rows of [query tokens, key tokens] at a time."""

    def __init__(
        self,
        cu_q: torch.Tensor,
        cu_k: torch.Tensor,
        key_lengths: torch.Tensor | None,
        sizes: tuple[int, int],
        causal: bool,
        window: int,
    ) -> None:
        self.causal, self.window = causal, window
        count = cu_q.numel() - 1
        self.doc_q, self.doc_k = document_of(cu_q, sizes[0]), document_of(cu_k, sizes[1])
        if key_lengths is None:
            key_lengths = cu_k[1:] - cu_k[:-1]
        inside_q, inside_k = (doc.clamp(0, max(count - 1, 0)) for doc in (self.doc_q, self.doc_k))
        self.place_k = torch.arange(sizes[1], device=cu_k.device) - cu_k[inside_k]
        place_q = torch.arange(sizes[0], device=cu_q.device) - cu_q[inside_q]
        self.place_q = place_q + (key_lengths - (cu_q[1:] - cu_q[:-1]))[inside_q]
        self.valid_q = (self.doc_q >= 0) & (self.doc_q < count)
        valid_k = (self.doc_k >= 0) & (self.doc_k < count)
        self.valid_k = valid_k & (self.place_k < key_lengths[inside_k])

    def rows(self, part: slice) -> torch.Tensor:
        """[rows of the part, key tokens], True where a query sees a key."""
        seen = self.doc_q[part, None] == self.doc_k[None, :]
        seen = seen & self.valid_q[part, None] & self.valid_k[None, :]
        distance = self.place_q[part, None] - self.place_k[None, :]
        if self.causal:
            seen = seen & (distance >= 0)
        if self.window > 0:
            seen = seen & (distance.abs() < self.window)
        return seen


def check_arguments(
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
        inside = ((key_lengths >= 0) & (key_lengths <= room)).all()
        if key_lengths.device.type != "cpu":
            require_on_device(inside, op, "key_lengths is wrong, wanted 0 to the keys of each document")
            return
        found = f"key_lengths is {key_lengths.tolist()}, the documents have {room.tolist()} keys"
        require(bool(inside), op, found)


def _parts(rows: int, scores: int) -> list[slice]:
    """Rows of queries, so many that their scores with all keys are PORTABLE_SCORES or fewer."""
    size = max(1, PORTABLE_SCORES // max(scores, 1))
    return [slice(begin, min(begin + size, rows)) for begin in range(0, rows, size)]


class _Weights:
    """Of some rows of queries: what they give to each key, heads first."""

    def __init__(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        seen: torch.Tensor,
        sinks: torch.Tensor | None,
        scale: float,
        softcap: float,
    ) -> None:
        scores = scale * queries @ keys.transpose(1, 2)
        self.slope: torch.Tensor | float = scale
        if softcap > 0:
            bent = torch.tanh(scores / softcap)
            scores, self.slope = softcap * bent, scale * (1 - bent * bent)
        scores = scores.masked_fill(~seen, float("-inf"))
        joined = scores
        if sinks is not None:
            joined = torch.cat((scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)), dim=2)
        self.lse = torch.logsumexp(joined, dim=2)
        self.finite_lse = self.lse.masked_fill(self.lse.isinf(), 0.0)
        weights = torch.exp(scores - self.finite_lse[..., None])
        self.weights = torch.where(seen, weights, 0.0)  # also where the row's lse is NaN


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
    """The operator in aten operations, for any device, some rows of queries at a time: every key is
    multiplied with every query. Right, and bounded in memory, not quick."""
    op = "varlen_attention"
    check_arguments(op, q, k, v, cu_q, cu_k, key_lengths, sinks, window, scale, softcap)
    group = q.shape[1] // k.shape[1]
    kind = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys, values = (t.transpose(0, 1).to(kind).repeat_interleave(group, 0) for t in (k, v))
    # 0 times the NaN of another document would be NaN: only rows that see such a value take it.
    finite = values.isfinite()
    values, bad = torch.where(finite, values, 0.0), (~finite).to(kind)
    sight = _Sight(cu_q, cu_k, key_lengths, (q.shape[0], k.shape[0]), causal, window)
    sink = None if sinks is None else sinks.to(kind)
    out = torch.zeros([*q.shape[:2], v.shape[2]], dtype=q.dtype, device=q.device)
    lse = torch.zeros([q.shape[1], q.shape[0]], dtype=torch.float32, device=q.device)
    for part in _parts(q.shape[0], q.shape[1] * k.shape[0]):
        seen, inside = sight.rows(part), sight.valid_q[part]
        found = _Weights(q[part].transpose(0, 1).to(kind), keys, seen, sink, scale, softcap)
        rows = found.weights @ values
        rows = rows.masked_fill(seen.to(kind) @ bad > 0, float("nan"))
        out[part] = torch.where(inside[None, :, None], rows, 0.0).transpose(0, 1).to(q.dtype)
        lse[:, part] = torch.where(inside[None, :], found.lse, 0.0).float()
    return out, lse


def _finite(t: torch.Tensor) -> torch.Tensor:
    return torch.where(t.isfinite(), t, 0.0)


class _Reach:
    """Where dq, dk and dv meet a NaN or an infinity, collected over rows of queries."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> None:
        self.group = q.shape[1] // k.shape[1]
        self.bad_q, bad_k, bad_v = ((~t.isfinite()).any(dim=2).T for t in (q, k, v))  # [heads, tokens]
        self.bad_k, self.bad_v = (t.repeat_interleave(self.group, 0).float() for t in (bad_k, bad_v))
        self.bad_dout = (~dout.isfinite()).transpose(0, 1)
        self.rows = torch.zeros_like(self.bad_q)
        self.of_k = torch.zeros([*k.shape[:2], 1], dtype=torch.bool, device=q.device)
        self.of_v = torch.zeros(v.shape, dtype=torch.bool, device=q.device)

    def add(self, part: slice, seen: torch.Tensor) -> None:
        pairs, any_seen = seen.float(), seen.any(dim=1)
        scores = (self.bad_q[:, part] & any_seen) | (self.bad_k @ pairs.T > 0)
        bad_dout = self.bad_dout[:, part]
        rows = scores | (bad_dout.any(dim=2) & any_seen) | (self.bad_v @ pairs.T > 0)
        self.rows[:, part] = rows
        self.of_k |= self._of_keys(pairs, rows[..., None])
        self.of_v |= self._of_keys(pairs, scores[..., None] | bad_dout)

    def _of_keys(self, pairs: torch.Tensor, marked: torch.Tensor) -> torch.Tensor:
        """[heads, queries, n] to [keys, key heads, n]."""
        met = pairs.T @ marked.float() > 0
        return met.unflatten(0, (-1, self.group)).any(dim=1).transpose(0, 1)


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
    """The gradients in aten operations, some rows of queries at a time; the weights are computed again.

        dv = p^T dout,  ds = p (dout v^T - sum dout out) slope,  dq = ds k,  dk = ds^T q

    On values without NaN and infinities; what those reach, pair by pair that sees each other, is NaN.
    """
    op = "varlen_attention_backward"
    check_tensors(op, q=q, dout=dout, out=out, lse=lse)
    check_arguments(op, q, k, v, cu_q, cu_k, key_lengths, sinks, window, scale, softcap)
    for what, t in (("out", out), ("dout", dout)):
        check_float(op, what, t, q.dtype)
        check_shape(op, what, t, [*q.shape[:2], v.shape[2]])
    check_float(op, "lse", lse, torch.float32)
    check_shape(op, "lse", lse, [q.shape[1], q.shape[0]])
    group = q.shape[1] // k.shape[1]
    qf, kf, vf, df = (_finite(t.float()).transpose(0, 1) for t in (q, k, v, dout))
    keys, values = (t.repeat_interleave(group, 0) for t in (kf, vf))
    sight = _Sight(cu_q, cu_k, key_lengths, (q.shape[0], k.shape[0]), causal, window)
    sink = None if sinks is None else sinks.float()
    dq, dk, dv = torch.zeros_like(qf), torch.zeros_like(keys), torch.zeros_like(values)
    dsinks = torch.zeros([0 if sinks is None else q.shape[1]], dtype=torch.float32, device=q.device)
    reach = _Reach(q, k, v, dout)
    for part in _parts(q.shape[0], q.shape[1] * k.shape[0]):
        seen = sight.rows(part)
        found = _Weights(qf[:, part], keys, seen, sink, scale, softcap)
        up = torch.where(sight.valid_q[part][None, :, None], df[:, part], 0.0)
        delta = (up * (found.weights @ values)).sum(dim=2, keepdim=True)
        # Of finite values, too, a product may be infinite: keys out of sight have no part in it.
        along = torch.where(seen, up @ values.transpose(1, 2), 0.0)
        ds = found.weights * (along - delta) * found.slope
        dv += found.weights.transpose(1, 2) @ up
        dq[:, part] = ds @ keys
        dk += ds.transpose(1, 2) @ qf[:, part]
        if sink is not None:
            dsinks -= (torch.exp(sink[:, None] - found.finite_lse) * delta[..., 0]).sum(dim=1)
        reach.add(part, seen)
    grads = [dq, *(t.unflatten(0, (-1, group)).sum(1) for t in (dk, dv))]
    reached = (reach.rows.T[..., None], reach.of_k, reach.of_v)
    dq, dk, dv = (
        g.transpose(0, 1).to(t.dtype).masked_fill(nan, float("nan"))
        for g, t, nan in zip(grads, (q, k, v), reached, strict=True)
    )
    if sinks is not None:
        dsinks = dsinks.masked_fill(reach.rows.any(dim=1), float("nan"))
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), dsinks


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


torch.library.impl("monograph::varlen_attention", "CompositeExplicitAutograd")(
    serve("varlen_attention", portable_varlen_attention, OTHERWISE)
)
torch.library.impl("monograph::varlen_attention_backward", "CompositeExplicitAutograd")(
    serve("varlen_attention_backward", portable_varlen_attention_backward, OTHERWISE)
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, cu_q, cu_k, key_lengths, sinks, *ctx.options = inputs
    out, lse = output
    mark_attention(out)
    ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k, key_lengths, sinks)
    ctx.mark_non_differentiable(lse)


def _backward(ctx: Any, dout: torch.Tensor, _: Any) -> tuple[Any, ...]:
    *tensors, sinks = ctx.saved_tensors
    dq, dk, dv, dsinks = torch.ops.monograph.varlen_attention_backward(dout, *tensors, sinks, *ctx.options)
    return dq, dk, dv, None, None, None, None if sinks is None else dsinks, None, None, None, None


register_autograd("varlen_attention", _backward, _setup_context)
register_not_differentiable("varlen_attention_backward")


@autocast_rule("varlen_attention")
def _autocast(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """As torch treats its own attention: a rotary embedding in float32 leaves q and k wider than v."""
    q, k, v = (cast(t) for t in (q, k, v))
    with without_autocast(q):
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
