"""monograph::gated_delta_rule: the recurrence of Qwen3-Next and its kin over documents packed in one row.

    S = e^g S;  v' = beta (v - k^T S);  S = S + k v'^T;  out = scale q^T S      per token and value head

q, k [tokens, key heads, key size], v [tokens, value heads, value size]; g and beta [tokens, value heads].
Value head h reads key head h / (value heads / key heads). Document n owns the tokens [cu[n], cu[n + 1]) and
begins with state[n] in float32, or zeros. `l2norm` divides q and k by sqrt(sum of squares + 1e-6) first.
Tokens outside every document give 0. Nothing is saved but the inputs. A second derivative raises.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from monograph import _library  # noqa: F401  (the schemas are registered there)
from monograph.ops.argument_checks import (
    check_float,
    check_number,
    check_optional_tensors,
    check_shape,
    check_tensors,
    dtype_name,
    require,
)
from monograph.ops.autocast import cast
from monograph.ops.autograd import register_autograd, register_not_differentiable
from monograph.ops.documents import check_offsets

EPS = 1e-6


def gated_delta_rule(
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
    """out [tokens, value heads, value size] in the dtype of v, and the final state in float32
    [documents, value heads, key size, value size]; without keep_state of no document."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, final_state = torch.ops.monograph.gated_delta_rule(
        q, k, v, g, beta, cu, state, scale, l2norm, keep_state
    )
    return out, final_state


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _check(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu: torch.Tensor,
    state: torch.Tensor | None,
    scale: float,
) -> None:
    check_tensors(op, q=q, k=k, v=v, g=g, beta=beta, cu=cu)
    check_optional_tensors(op, q, state=state)
    for what, t in (("q", q), ("k", k), ("v", v)):
        check_float(op, what, t, q.dtype)
        require(t.dim() == 3, op, f"{what} has {t.dim()} dimensions, wanted [tokens, heads, size]")
        require(t.shape[2] > 0, op, f"{what} has heads of 0, wanted 1 or more")
    check_shape(op, "k", k, q.shape)
    tokens, key_heads, key_size = q.shape
    heads, size = v.shape[1:]
    check_shape(op, "v", v, [tokens, heads, size])
    whole = key_heads > 0 and heads > 0 and heads % key_heads == 0
    require(whole, op, f"{heads} value heads are no multiple of {key_heads} key heads")
    for what, t in (("g", g), ("beta", beta)):
        check_float(op, what, t)
        fits = t.dtype in (q.dtype, _wide(q.dtype))
        require(fits, op, f"{what} is {dtype_name(t.dtype)}, wanted {dtype_name(q.dtype)} as q, or float32")
        check_shape(op, what, t, [tokens, heads])
    check_number(op, "scale", scale)
    require(cu.numel() >= 1, op, "cu is empty, wanted at least one offset")
    check_offsets(op, "cu", cu, tokens)
    if state is not None:
        check_float(op, "state", state, _wide(q.dtype))
        check_shape(op, "state", state, [cu.numel() - 1, heads, key_size, size])


def _normed(t: torch.Tensor, l2norm: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """q or k in float32, and what it was multiplied with."""
    wide = t.to(_wide(t.dtype))
    squares = wide.pow(2).sum(-1, keepdim=True)
    factor = torch.rsqrt(squares + EPS) if l2norm else torch.ones_like(squares)
    return wide * factor, factor


def _documents(cu: torch.Tensor) -> list[tuple[int, int]]:
    return list(pairwise(cu.tolist()))


def portable_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu: torch.Tensor,
    state: torch.Tensor | None,
    scale: float,
    l2norm: bool,
    keep_state: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator in aten operations, for any device: token by token."""
    _check("gated_delta_rule", q, k, v, g, beta, cu, state, scale)
    group, wide = v.shape[1] // q.shape[1], _wide(q.dtype)
    queries, keys = (_normed(t, l2norm)[0].repeat_interleave(group, 1) for t in (q, k))
    values, decay, rate = v.to(wide), g.to(wide).exp(), beta.to(wide)
    shape = [v.shape[1], q.shape[2], v.shape[2]]
    rows = [torch.zeros_like(values[0]) if v.shape[0] else values.new_zeros(shape[0], shape[2])] * v.shape[0]
    finals = []
    for n, (begin, end) in enumerate(_documents(cu)):
        s = torch.zeros(shape, dtype=wide, device=v.device) if state is None else state[n]
        for t in range(begin, end):
            s = decay[t][:, None, None] * s
            update = rate[t][:, None] * (values[t] - (keys[t][:, :, None] * s).sum(1))
            s = s + keys[t][:, :, None] * update[:, None, :]
            rows[t] = scale * (queries[t][:, :, None] * s).sum(1)
        finals.append(s)
    out = torch.stack(rows) if rows else values
    final = torch.stack(finals) if keep_state and finals else values.new_zeros([0, *shape])
    return out.to(v.dtype).contiguous(), final.contiguous()


def portable_gated_delta_rule_backward(
    dout: torch.Tensor,
    dfinal: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu: torch.Tensor,
    state: torch.Tensor | None,
    scale: float,
    l2norm: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients in aten operations, in the dtypes of the inputs; dstate is empty without a state."""
    op = "gated_delta_rule_backward"
    check_tensors(op, q=q, dout=dout)
    check_optional_tensors(op, q, dfinal=dfinal)
    _check(op, q, k, v, g, beta, cu, state, scale)
    check_float(op, "dout", dout, v.dtype)
    check_shape(op, "dout", dout, v.shape)
    group, wide = v.shape[1] // q.shape[1], _wide(q.dtype)
    shape = [v.shape[1], q.shape[2], v.shape[2]]
    if dfinal is not None:
        check_float(op, "dfinal", dfinal, wide)
        check_shape(op, "dfinal", dfinal, [cu.numel() - 1, *shape])
    queries, keys = (_normed(t, l2norm)[0].repeat_interleave(group, 1) for t in (q, k))
    values, decay, rate, d = v.to(wide), g.to(wide).exp(), beta.to(wide), dout.to(wide)
    dq, dk = torch.zeros_like(queries), torch.zeros_like(keys)
    dv, dg, dbeta = torch.zeros_like(values), torch.zeros_like(decay), torch.zeros_like(rate)
    dstate = values.new_zeros([0] if state is None else state.shape)
    for n, (begin, end) in enumerate(_documents(cu)):
        s = torch.zeros(shape, dtype=wide, device=v.device) if state is None else state[n]
        steps = []  # the state after the decay, what k^T reads of it, the state at the end
        for t in range(begin, end):
            decayed = decay[t][:, None, None] * s
            rest = values[t] - (keys[t][:, :, None] * decayed).sum(1)
            s = decayed + keys[t][:, :, None] * (rate[t][:, None] * rest)[:, None, :]
            steps.append((decayed, rest, s))
        ds = torch.zeros(shape, dtype=wide, device=v.device) if dfinal is None else dfinal[n]
        for t in reversed(range(begin, end)):
            decayed, rest, s = steps[t - begin]
            ds = ds + scale * queries[t][:, :, None] * d[t][:, None, :]
            dq[t] = scale * (s * d[t][:, None, :]).sum(2)
            dupdate = (keys[t][:, :, None] * ds).sum(1)
            dbeta[t] = (dupdate * rest).sum(1)
            dv[t] = rate[t][:, None] * dupdate
            dk[t] = (ds * (rate[t][:, None] * rest)[:, None, :]).sum(2) - (decayed * dv[t][:, None, :]).sum(2)
            ds = ds - keys[t][:, :, None] * dv[t][:, None, :]
            dg[t] = (ds * decayed).sum((1, 2))
            ds = decay[t][:, None, None] * ds
        if state is not None:
            dstate[n] = ds
    dq, dk = (
        _unnormed(t, grad.unflatten(1, (q.shape[1], group)).sum(2), l2norm) for t, grad in ((q, dq), (k, dk))
    )
    return dq, dk, dv.to(v.dtype), dg.to(g.dtype), dbeta.to(beta.dtype), dstate


def _unnormed(t: torch.Tensor, grad: torch.Tensor, l2norm: bool) -> torch.Tensor:
    """The gradient of q or k from that of what `_normed` made of it; 0 where none came, whatever t holds."""
    if l2norm:
        _, factor = _normed(t, l2norm)
        wide = t.to(grad.dtype)
        through = grad * factor - wide * ((grad * wide).sum(-1, keepdim=True) * factor * factor * factor)
        grad = torch.where((grad == 0).all(-1, keepdim=True), 0.0, through)
    return grad.to(t.dtype)


@torch.library.register_fake("monograph::gated_delta_rule")
def _(q, k, v, g, beta, cu, state, scale, l2norm, keep_state):  # type: ignore[no-untyped-def]
    op = "gated_delta_rule"
    check_tensors(op, q=q, k=k, v=v, g=g, beta=beta, cu=cu)
    check_optional_tensors(op, q, state=state)
    for what, t in (("q", q), ("k", k), ("v", v)):
        require(t.dim() == 3, op, f"{what} has {t.dim()} dimensions, wanted [tokens, heads, size]")
    require(cu.dim() == 1, op, f"cu has {cu.dim()} dimensions, wanted one")
    documents = cu.shape[0] - 1 if keep_state else 0
    final = [documents, v.shape[1], q.shape[2], v.shape[2]]
    return v.new_empty(list(v.shape)), v.new_empty(final, dtype=_wide(q.dtype))


@torch.library.register_fake("monograph::gated_delta_rule_backward")
def _(dout, dfinal, q, k, v, g, beta, cu, state, scale, l2norm):  # type: ignore[no-untyped-def]
    op = "gated_delta_rule_backward"
    check_tensors(op, q=q, dout=dout, k=k, v=v, g=g, beta=beta, cu=cu)
    check_optional_tensors(op, q, dfinal=dfinal, state=state)
    dstate = q.new_empty([0] if state is None else list(state.shape), dtype=_wide(q.dtype))
    return (*(t.new_empty(list(t.shape)) for t in (q, k, v, g, beta)), dstate)


torch.library.impl("monograph::gated_delta_rule", "CompositeExplicitAutograd")(portable_gated_delta_rule)
torch.library.impl("monograph::gated_delta_rule_backward", "CompositeExplicitAutograd")(
    portable_gated_delta_rule_backward
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.scale, ctx.l2norm, ctx.keep_state = inputs
    ctx.save_for_backward(*tensors)
    if not ctx.keep_state:
        ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dout: torch.Tensor, dfinal: torch.Tensor) -> tuple[Any, ...]:
    *tensors, state = ctx.saved_tensors
    *grads, dstate = torch.ops.monograph.gated_delta_rule_backward(
        dout, dfinal if ctx.keep_state else None, *tensors, state, ctx.scale, ctx.l2norm
    )
    return *grads, None, None if state is None else dstate, None, None, None


register_autograd("gated_delta_rule", _backward, _setup_context)
register_not_differentiable("gated_delta_rule_backward")


@torch.library.impl("monograph::gated_delta_rule", "AutocastCPU")
def _autocast(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k and v as torch treats attention; g and beta in float32 stay."""
    q, k, v = (cast(t) for t in (q, k, v))
    g, beta = (t if t.dtype == torch.float32 else cast(t) for t in (g, beta))
    with torch.amp.autocast("cpu", enabled=False):
        return torch.ops.monograph.gated_delta_rule(q, k, v, g, beta, *rest)


@register_flop_formula(torch.ops.monograph.gated_delta_rule)
def _flops(q, k, v, *rest, out_shape=None, **_):  # type: ignore[no-untyped-def]
    """Of the recurrence: three products of a vector with the state for each token and value head."""
    return 6 * v[0] * v[1] * v[2] * q[2]


@register_flop_formula(torch.ops.monograph.gated_delta_rule_backward)
def _backward_flops(dout, dfinal, q, k, v, *rest, out_shape=None, **_):  # type: ignore[no-untyped-def]
    """The states again, and six such products."""
    return 16 * v[0] * v[1] * v[2] * q[2]
