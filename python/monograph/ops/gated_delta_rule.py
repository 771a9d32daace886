"""monograph::gated_delta_rule: the recurrence of GatedDeltaNet over documents packed in one row.

    S = e^g S;   S = S + k (beta (v - k^T S))^T;   out = scale q^T S        per token and value head

S [Dk, Dv] starts as `state[n]`, or 0, where document n begins; rows outside every document give 0. q and k
stay unrepeated: value head h reads key head h // (value heads / key heads). With `l2norm`, q and k are
divided by sqrt(sum x^2 + 1e-6) first. Nothing is saved for backward but the inputs. A second derivative
raises.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

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
from monograph.ops.autocast import autocast_rule, cast, without_autocast
from monograph.ops.autograd import register_autograd, register_not_differentiable
from monograph.ops.documents import check_offsets
from monograph.ops.providers import serve

CHUNK = 64  # tokens that one solve takes; a chunk begins where a document does
_EPSILON = 1e-6  # of transformers' l2norm


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
    """The output [tokens, value heads, Dv] in the dtype of v, and the states behind the documents' ends.

    q, k [tokens, key heads, Dk] and v [tokens, value heads, Dv]; g (the log of the decay, 0 or less) and beta
    [tokens, value heads]; cu int32 [documents + 1], as `cu_q` of `varlen_attention`; state float32
    [documents, value heads, Dk, Dv]. The states are empty, [0, value heads, Dk, Dv], without `keep_state`.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return torch.ops.monograph.gated_delta_rule(q, k, v, g, beta, cu, state, scale, l2norm, keep_state)


def check_arguments(
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
    check_shape(op, "k", k, q.shape)
    require(v.shape[0] == q.shape[0], op, f"v has {v.shape[0]} tokens, wanted {q.shape[0]} as q")
    heads, key_heads = v.shape[1], q.shape[1]
    whole = heads > 0 and key_heads > 0 and heads % key_heads == 0
    require(whole, op, f"{heads} value heads are no multiple of {key_heads} key heads")
    for size in (q.shape[2], v.shape[2]):
        require(size >= 1, op, f"head size {size}, wanted 1 or more")
    for what, t in (("g", g), ("beta", beta)):
        check_float(op, what, t)
        if t.dtype not in (torch.float32, q.dtype):
            names = dtype_name(t.dtype), dtype_name(q.dtype)
            raise ValueError(f"{op}: {what} is {names[0]}, wanted float32, or {names[1]} as q")
        check_shape(op, what, t, [q.shape[0], heads])
    check_number(op, "scale", scale, signed=True)
    require(cu.numel() >= 1, op, "cu is empty, wanted at least one offset")
    check_offsets(op, "cu", cu, q.shape[0])
    if state is not None:
        check_float(op, "state", state)
        found, wanted = dtype_name(state.dtype), dtype_name(_wide(q))
        require(found == wanted, op, f"state is {found}, wanted {wanted}")
        check_shape(op, "state", state, [cu.numel() - 1, heads, q.shape[2], v.shape[2]])


def _wide(t: torch.Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


def _norm_factor(x: torch.Tensor, l2norm: bool) -> torch.Tensor:
    return torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPSILON) if l2norm else torch.ones_like(x[..., :1])


class _Chunk:
    """What forward and backward need of a chunk, heads first; k is of value heads, G the sum of g so far.

    lower V' = right:  (I + tril(beta K K^T decay, -1)) V' = beta (V - e^G K S)

    Exponentials of differences only, none of them above 1 for g of 0 or less.
    """

    def __init__(
        self, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
    ) -> None:
        total = g.cumsum(1)[..., None]  # [heads, tokens, 1]
        later = torch.ones(v.shape[1], v.shape[1], dtype=torch.bool, device=v.device).triu(1)
        self.k, self.state, self.beta = k, state, beta[..., None]
        self.decay = (total - total.transpose(1, 2)).masked_fill(later, float("-inf")).exp()
        self.before, self.behind = total.exp(), (total[:, -1:] - total).exp()
        self.lower = (self.beta * (k @ k.transpose(1, 2)) * self.decay).tril(-1)
        self.read = k @ state
        self.error = v - self.before * self.read
        self.new = torch.linalg.solve_triangular(
            self.lower, self.beta * self.error, upper=False, unitriangular=True
        )

    def output(self, q: torch.Tensor, scale: float) -> torch.Tensor:
        pairs = (q @ self.k.transpose(1, 2)) * self.decay
        return scale * (self.before * (q @ self.state) + pairs @ self.new)

    def next_state(self) -> torch.Tensor:
        return self.before[:, -1:] * self.state + (self.behind * self.k).transpose(1, 2) @ self.new

    def gradients(
        self, q: torch.Tensor, dout: torch.Tensor, dstate: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, ...]:
        """Of q, k, v, g, beta and the state. `dtotal` counts pairs of different tokens only: what cancels in
        the sum over a row would drown the gradient of g under strong decay."""
        k, new, before, beta = self.k, self.new, self.before, self.beta
        dout = scale * dout
        weights = (q @ k.transpose(1, 2)) * self.decay
        dweights = (dout @ new.transpose(1, 2)) * self.decay
        dnew = weights.transpose(1, 2) @ dout + self.behind * (k @ dstate)
        dk_state = self.behind * (new @ dstate.transpose(1, 2))
        dq_state = before * (dout @ self.state.transpose(1, 2))
        dright = torch.linalg.solve_triangular(
            self.lower.transpose(1, 2), dnew, upper=True, unitriangular=True
        )
        dlower = -(dright @ new.transpose(1, 2)).tril(-1)
        dread = -beta * before * dright
        dkk = dlower * self.decay
        along = dkk @ k
        dq = dq_state + dweights @ k
        dk = dk_state + dweights.transpose(1, 2) @ q + dread @ self.state.transpose(1, 2)
        dk = dk + beta * along + dkk.transpose(1, 2) @ (beta * k)
        dbeta = (dright * self.error).sum(-1) + (along * k).sum(-1)
        pairs = (dweights * (q @ k.transpose(1, 2))).tril(-1) + dlower * self.lower
        tail = (dk_state * k).sum(-1)[:, :-1]
        dtotal = (dq_state * q).sum(-1) + (dread * self.read).sum(-1) + pairs.sum(2) - pairs.sum(1)
        kept = before[:, -1:] * dstate
        dtotal[:, :-1] -= tail
        dtotal[:, -1] += (self.state * kept).sum((1, 2)) + tail.sum(1)
        dg = dtotal.flip(1).cumsum(1).flip(1)
        dstart = kept + (before * q).transpose(1, 2) @ dout + k.transpose(1, 2) @ dread
        return dq, dk, beta * dright, dg, dbeta, dstart


class _Document:
    """One document in a wide dtype, heads first; q and k of key heads."""

    def __init__(self, tensors: list[torch.Tensor], state: torch.Tensor, scale: float, l2norm: bool) -> None:
        q, k, *self.rest = tensors
        self.group, self.scale, self.l2norm, self.state = (
            self.rest[0].shape[0] // q.shape[0],
            scale,
            l2norm,
            state,
        )
        self.factors = [_norm_factor(t, l2norm) for t in (q, k)]
        self.normed = [t * factor for t, factor in zip((q, k), self.factors, strict=True)]
        self.q, self.k = (t.repeat_interleave(self.group, 0) for t in self.normed)
        self.parts = [slice(i, i + CHUNK) for i in range(0, self.q.shape[1], CHUNK)]

    def chunk(self, here: slice, state: torch.Tensor) -> _Chunk:
        v, g, beta = (t[:, here] for t in self.rest)
        return _Chunk(self.k[:, here], v, g, beta, state)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, state = [], self.state
        for here in self.parts:
            chunk = self.chunk(here, state)
            outputs.append(chunk.output(self.q[:, here], self.scale))
            state = chunk.next_state()
        return torch.cat(outputs, 1), state

    def backward(self, dout: torch.Tensor, dstate: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The gradients of q, k, v, g, beta and of the state; the states are scanned again."""
        states = [self.state]
        for here in self.parts[:-1]:
            states.append(self.chunk(here, states[-1]).next_state())
        found = []
        for here, state in zip(reversed(self.parts), reversed(states), strict=True):
            chunk = self.chunk(here, state)
            *gradients, dstate = chunk.gradients(self.q[:, here], dout[:, here], dstate, self.scale)
            found.append(gradients)
        dq, dk, *rest = (torch.cat(pieces[::-1], 1) for pieces in zip(*found, strict=True))
        sums = []
        for gradient, normed, factor in zip((dq, dk), self.normed, self.factors, strict=True):
            total = gradient.unflatten(0, (-1, self.group)).sum(1)
            if self.l2norm:
                total = factor * (total - normed * (normed * total).sum(-1, keepdim=True))
            sums.append(total)
        return (*sums, *rest, dstate)


def _of_heads(kind: torch.dtype, tensors: tuple[torch.Tensor, ...], here: slice) -> list[torch.Tensor]:
    """The rows of one document, heads first, in the dtype that is computed in."""
    return [t[here].to(kind).transpose(0, 1) for t in tensors]


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
    """The operator in aten operations, for any device; a document's bits depend on nothing but itself."""
    check_arguments("gated_delta_rule", q, k, v, g, beta, cu, state, scale)
    kind, shape = _wide(q), [v.shape[1], q.shape[2], v.shape[2]]
    out = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    starts = torch.zeros([cu.numel() - 1, *shape], dtype=kind, device=v.device) if state is None else state
    final = starts.clone() if keep_state else torch.zeros([0, *shape], dtype=kind, device=v.device)
    for n, (begin, end) in enumerate(pairwise(cu.tolist())):
        if begin == end:
            continue
        inputs = _of_heads(kind, (q, k, v, g, beta), slice(begin, end))
        rows, last = _Document(inputs, starts[n], scale, l2norm).forward()
        out[begin:end] = rows.transpose(0, 1).to(v.dtype)
        if keep_state:
            final[n] = last
    return out, final


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
) -> tuple[torch.Tensor, ...]:
    """The gradients in aten operations, a document at a time."""
    op = "gated_delta_rule_backward"
    check_tensors(op, q=q, dout=dout)
    check_optional_tensors(op, q, dfinal=dfinal)
    check_arguments(op, q, k, v, g, beta, cu, state, scale)
    check_float(op, "dout", dout, v.dtype)
    check_shape(op, "dout", dout, v.shape)
    kind, shape = _wide(q), [v.shape[1], q.shape[2], v.shape[2]]
    if dfinal is not None:
        check_float(op, "dfinal", dfinal, kind)
        check_shape(op, "dfinal", dfinal, [cu.numel() - 1, *shape])
    grads = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v, g, beta)]
    dstate = torch.zeros([0 if state is None else cu.numel() - 1, *shape], dtype=kind, device=v.device)
    if state is not None and dfinal is not None:
        dstate = dfinal.clone()  # an empty document hands its state on
    for n, (begin, end) in enumerate(pairwise(cu.tolist())):
        if begin == end:
            continue
        here = slice(begin, end)
        nothing = torch.zeros(shape, dtype=kind, device=v.device)
        inputs = _of_heads(kind, (q, k, v, g, beta), here)
        document = _Document(inputs, nothing if state is None else state[n], scale, l2norm)
        (rows,) = _of_heads(kind, (dout,), here)
        *found, dstart = document.backward(rows, nothing if dfinal is None else dfinal[n])
        for gradient, part in zip(grads, found, strict=True):
            gradient[here] = part.transpose(0, 1).to(gradient.dtype)
        if state is not None:
            dstate[n] = dstart
    return (*grads, dstate)


@torch.library.register_fake("monograph::gated_delta_rule")
def _(q, k, v, g, beta, cu, state, scale, l2norm, keep_state):  # type: ignore[no-untyped-def]
    op = "gated_delta_rule"
    check_tensors(op, q=q, k=k, v=v, g=g, beta=beta, cu=cu)
    check_optional_tensors(op, q, state=state)
    for what, t in (("q", q), ("k", k), ("v", v)):
        require(t.dim() == 3, op, f"{what} has {t.dim()} dimensions, wanted [tokens, heads, size]")
    require(cu.dim() == 1, op, f"cu has {cu.dim()} dimensions, wanted one")
    if state is not None:
        check_shape(op, "state", state, [cu.shape[0] - 1, v.shape[1], q.shape[2], v.shape[2]])
    documents = cu.shape[0] - 1 if keep_state else 0
    final = q.new_empty([documents, v.shape[1], q.shape[2], v.shape[2]], dtype=_wide(q))
    return v.new_empty(list(v.shape)), final


@torch.library.register_fake("monograph::gated_delta_rule_backward")
def _(dout, dfinal, q, k, v, g, beta, cu, state, scale, l2norm):  # type: ignore[no-untyped-def]
    op = "gated_delta_rule_backward"
    check_tensors(op, q=q, dout=dout, k=k, v=v, g=g, beta=beta, cu=cu)
    check_optional_tensors(op, q, dfinal=dfinal, state=state)
    for what, t in (("q", q), ("v", v)):
        require(t.dim() == 3, op, f"{what} has {t.dim()} dimensions, wanted [tokens, heads, size]")
    documents = 0 if state is None else cu.shape[0] - 1
    dstate = q.new_empty([documents, v.shape[1], q.shape[2], v.shape[2]], dtype=_wide(q))
    return (*(t.new_empty(list(t.shape)) for t in (q, k, v, g, beta)), dstate)


torch.library.impl("monograph::gated_delta_rule", "CompositeExplicitAutograd")(
    serve("gated_delta_rule", portable_gated_delta_rule)
)
torch.library.impl("monograph::gated_delta_rule_backward", "CompositeExplicitAutograd")(
    serve("gated_delta_rule_backward", portable_gated_delta_rule_backward)
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.scale, ctx.l2norm, ctx.keep_state = inputs
    ctx.save_for_backward(*tensors)
    if not ctx.keep_state:
        ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dout: torch.Tensor, dfinal: torch.Tensor | None) -> tuple[Any, ...]:
    *tensors, state = ctx.saved_tensors
    *grads, dstate = torch.ops.monograph.gated_delta_rule_backward(
        dout, dfinal if ctx.keep_state else None, *tensors, state, ctx.scale, ctx.l2norm
    )
    return (*grads, None, None if state is None else dstate, None, None, None)


register_autograd("gated_delta_rule", _backward, _setup_context)
register_not_differentiable("gated_delta_rule_backward")


@autocast_rule("gated_delta_rule")
def _autocast(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k and v as torch treats the arguments of its products; g and beta are taken wide."""
    q, k, v = (cast(t) for t in (q, k, v))
    g, beta = (t if t.dtype == q.dtype else t.float() for t in (g, beta))
    with without_autocast(q):
        return torch.ops.monograph.gated_delta_rule(q, k, v, g, beta, *rest)


@register_flop_formula(torch.ops.monograph.gated_delta_rule)
def _flops(q, k, v, *rest, out_shape=None, **_):  # type: ignore[no-untyped-def]
    """Of the recurrence: k^T S, k v'^T and q^T S per token and value head."""
    return 2 * 3 * v[0] * v[1] * q[2] * v[2]


@register_flop_formula(torch.ops.monograph.gated_delta_rule_backward)
def _backward_flops(dout, dfinal, q, k, v, *rest, out_shape=None, **_):  # type: ignore[no-untyped-def]
    """Two products to scan the states again, two for each of the forward's three."""
    return 2 * 8 * v[0] * v[1] * q[2] * v[2]
