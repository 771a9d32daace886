"""monograph::choose_experts: which experts a token goes to and with which weights, of its router's logits.

    p = softmax(logits);  ids = the experts of the `slots` largest logits;  weights = p[ids]

or, normalised, p[ids] / sum(p[ids]). The largest comes first, of equals the expert with the lowest number,
where torch.topk says nothing. Everything is float64, rounded to float32 and then to the dtype of the logits.
The gradient of the weights reaches the logits; a second derivative raises.
"""

from __future__ import annotations

from typing import Any

import torch

from monograph.ops import library  # noqa: F401  (the schemas are registered there)
from monograph.ops.argument_checks import check_float, check_shape, check_tensors, dtype_name, require
from monograph.ops.autograd import register_autograd, register_not_differentiable


def choose_experts(logits: torch.Tensor, slots: int, *, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights in the dtype of logits, ids int64), [tokens, slots] each, of logits [tokens, experts]."""
    return torch.ops.monograph.choose_experts(logits, slots, normalise)


def _check(op: str, logits: torch.Tensor, slots: int) -> None:
    check_float(op, "logits", logits)
    require(logits.dim() == 2, op, f"logits has {logits.dim()} dimensions, wanted 2")
    experts = logits.shape[1]
    require(1 <= slots <= experts, op, f"slots is {slots}, wanted 1 to the experts, {experts}")


def _check_gradient(dweights: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor) -> None:
    op = "choose_experts_backward"
    check_tensors(op, dweights=dweights, logits=logits, ids=ids)
    require(ids.dtype == torch.int64, op, f"ids has dtype {dtype_name(ids.dtype)}, wanted int64")
    require(ids.dim() == 2, op, f"ids has {ids.dim()} dimensions, wanted 2")
    _check(op, logits, ids.shape[1])
    check_shape(op, "ids", ids, [logits.shape[0], ids.shape[1]])
    check_float(op, "dweights", dweights, logits.dtype)
    check_shape(op, "dweights", dweights, list(ids.shape))


def _exponentials(logits: torch.Tensor) -> torch.Tensor:
    wide = logits.double()
    return (wide - wide.amax(-1, keepdim=True)).exp()


def _rounded(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return t.to(dtype) if dtype == torch.float64 else t.float().to(dtype)


def portable_choose_experts(
    logits: torch.Tensor, slots: int, normalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator in aten operations, for any device that has float64."""
    check_tensors("choose_experts", logits=logits)
    _check("choose_experts", logits, slots)
    shares = _exponentials(logits)
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :slots].contiguous()
    chosen = shares.gather(1, ids)
    total = chosen if normalise else shares
    return _rounded(chosen / total.sum(-1, keepdim=True), logits.dtype), ids


def portable_choose_experts_backward(
    dweights: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor, normalise: bool
) -> torch.Tensor:
    _check_gradient(dweights, logits, ids)
    shares = _exponentials(logits)
    inside = (ids >= 0) & (ids < logits.shape[1])
    places = torch.where(inside, ids, 0)
    given = torch.zeros_like(shares).scatter_add(1, places, torch.where(inside, dweights.double(), 0.0))
    chosen = torch.zeros_like(shares).scatter_add(1, places, inside.double()) > 0
    picked = torch.where(inside, shares.gather(1, places), 0.0)
    shares = shares / (picked if normalise else shares).sum(-1, keepdim=True)
    along = torch.where(inside, dweights.double() * shares.gather(1, places), 0.0).sum(-1, keepdim=True)
    found = shares * (given - along)
    return _rounded(torch.where(chosen, found, 0.0) if normalise else found, logits.dtype)


@torch.library.register_fake("monograph::choose_experts")
def _(logits, slots, normalise):  # type: ignore[no-untyped-def]
    check_tensors("choose_experts", logits=logits)
    _check("choose_experts", logits, slots)
    shape = [logits.shape[0], slots]
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int64)


@torch.library.register_fake("monograph::choose_experts_backward")
def _(dweights, logits, ids, normalise):  # type: ignore[no-untyped-def]
    _check_gradient(dweights, logits, ids)
    return logits.new_empty(list(logits.shape))


torch.library.impl("monograph::choose_experts", "CompositeExplicitAutograd")(portable_choose_experts)
torch.library.impl("monograph::choose_experts_backward", "CompositeExplicitAutograd")(
    portable_choose_experts_backward
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, _, ctx.normalise = inputs
    ctx.save_for_backward(logits, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dweights: torch.Tensor, _: Any) -> tuple[Any, ...]:
    logits, ids = ctx.saved_tensors
    dlogits = torch.ops.monograph.choose_experts_backward(dweights, logits, ids, ctx.normalise)
    return dlogits, None, None


register_autograd("choose_experts", _backward, _setup_context)
register_not_differentiable("choose_experts_backward")
