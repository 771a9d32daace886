"""monograph::experts and its gradients by torch's `grouped_mm`: the slots of all experts in one product.

Beside the roundings of the operator, each product is rounded to the dtype of x before what it is added to:
the dense and the low-rank part of a projection, the slots of a dx, dh, and the gradients of factors and
biases, which are then cast to theirs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from monograph.ops.argument_checks import dtype_name, require
from monograph.ops.attention_choice import capability_of
from monograph.ops.experts_activation import activate, activate_backward
from monograph.ops.experts_arguments import ExpertsArguments, check_experts, check_gradient
from monograph.ops.experts_grouped import grouped_products

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CAPABILITY = (8, 0)
# Where the offsets stay on the card; elsewhere torch 2.13 copies them to the host for each product (its issue
# 194227), as it does for other dtypes than bfloat16.
NO_HOST_READ = ((9, 0), (10, 0))


def why_not(operator: str, first: torch.Tensor, *rest: Any) -> str | None:
    x = first if operator == "experts" else rest[1]
    if not hasattr(F, "grouped_mm"):
        return f"torch {torch.__version__} has no grouped_mm, wanted 2.10 or newer"
    if x.dtype not in DTYPES:
        return f"the dtype is {dtype_name(x.dtype)}, wanted bfloat16, float16 or float32"
    capability = capability_of(first.device)
    if capability < CAPABILITY:
        return f"the card has compute capability {capability[0]}.{capability[1]}, wanted 8.0 or more"
    return None


def note(device: torch.device) -> str:
    """What an owner should know of this card; empty if nothing."""
    if device.type != "cuda" or capability_of(device) in NO_HOST_READ:
        return ""
    major, minor = capability_of(device)
    return f"grouped_mm of torch copies offsets to the host on sm_{major}{minor}"


def _wide(t: torch.Tensor) -> torch.Tensor:
    return t.to(torch.float32)


def _sum_of_slots(rows: torch.Tensor, k: int) -> torch.Tensor:
    """[T k, n] to [T, n] in float32, in the order of slots."""
    slots = rows.reshape(-1, k, rows.shape[1])
    total = torch.zeros_like(slots[:, 0], dtype=torch.float32)
    for j in range(k):
        total += slots[:, j]
    return total


def experts(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *rest, save = arguments
    given = ExpertsArguments(*rest)
    sizes = check_experts("experts", given)
    x, (tokens, k) = given.x, given.ids.shape
    if not (given.slots and sizes[0]):
        return x.new_zeros(tokens, sizes[2]), x.new_zeros(given.slots if save else 0, sizes[1])
    first, second, routes = grouped_products(given, sizes)
    pre = first.forward(x.index_select(0, routes.order // k))
    down = second.forward(activate(_wide(pre), given).to(x.dtype))
    weights = given.weights.reshape(-1, 1)
    weighted = torch.where(routes.to_slots(routes.inside), _wide(weights), 0) * routes.to_slots(down)
    return _sum_of_slots(weighted, k).to(x.dtype), pre.contiguous() if save else x.new_empty(0, sizes[1])


class _Backward:
    """What both gradients begin with; rows are sorted slots."""

    def __init__(self, op: str, dy: torch.Tensor, saved: torch.Tensor, given: ExpertsArguments) -> None:
        self.given, self.sizes = given, check_gradient(op, dy, saved, given)
        self.empty = not (given.slots and self.sizes[0])
        if self.empty:
            return
        self.first, self.second, self.routes = grouped_products(given, self.sizes)
        token = self.routes.order // given.ids.shape[1]
        self.x, self.dy = given.x.index_select(0, token), dy.index_select(0, token)
        weights = _wide(given.weights.reshape(-1)[self.routes.order, None])
        pre = _wide(saved if saved.shape[0] else self.first.forward(self.x))
        self.h = activate(pre, given).to(dy.dtype)
        self.dh = self.second.input_gradient(self.dy)
        dpre = activate_backward(weights * self.dh, pre, given)
        self.dpre = torch.where(self.routes.inside, dpre, 0).to(dy.dtype)
        self.weighted = (weights * self.dy).to(dy.dtype)

    def dweights(self) -> torch.Tensor:
        share = (_wide(self.h) * self.dh).sum(1)
        if self.second.bias is not None:
            bias = _wide(self.second.bias).index_select(0, self.routes.expert)
            share += (bias * self.dy).sum(1)
        return self.routes.to_slots(torch.where(self.routes.inside[:, 0], share, 0))

    def dx(self) -> torch.Tensor:
        rows = self.first.input_gradient(self.dpre)
        return _sum_of_slots(self.routes.to_slots(rows), self.given.ids.shape[1])


def experts_backward(dy: torch.Tensor, pre: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    *rest, need = arguments
    given = ExpertsArguments(*rest)
    require(len(need) == 6, "experts_backward", f"need has {len(need)} entries, wanted 6")
    back = _Backward("experts_backward", dy, pre, given)
    factors = (given.a1, given.b1), (given.a2, given.b2)
    like = [given.x, given.weights, given.bias1, given.bias2, *factors[0], *factors[1]]
    wanted = [*need[:4], need[4], need[4], need[5], need[5]]
    found: list[torch.Tensor | None] = [None] * len(like)
    parts = [] if back.empty else [(back.first, back.x, back.dpre), (back.second, back.h, back.weighted)]
    for i, (product, rows, gradient) in enumerate(parts):
        if need[2 + i] and product.bias is not None:
            found[2 + i] = back.routes.sums(gradient)
        if need[4 + i] and product.rank:
            found[4 + 2 * i : 6 + 2 * i] = product.factor_gradients(rows, gradient)
    if parts and need[0]:
        found[0] = back.dx()
    if parts and need[1]:
        found[1] = back.dweights()
    return tuple(_given(*one, given.x) for one in zip(found, like, wanted, strict=True))


def _given(
    found: torch.Tensor | None, like: torch.Tensor | None, wanted: bool, x: torch.Tensor
) -> torch.Tensor:
    """A gradient in the dtype and shape of its tensor; zeros without slots or ranks; empty if not wanted."""
    if like is None or not wanted:
        return x.new_empty(0)
    if found is None:
        return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    return found.to(like.dtype).reshape(like.shape).contiguous()


def experts_dw(dy: torch.Tensor, pre: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = ExpertsArguments(*arguments)
    plain = not given.scales1 and not given.scales2
    require(plain, "experts_dw", "the weights are packed, wanted plain ones")
    back = _Backward("experts_dw", dy, pre, given)
    if back.empty:
        return torch.zeros_like(given.values1), torch.zeros_like(given.values2)
    first = back.first.weight_gradient(back.x, back.dpre)
    second = back.second.weight_gradient(back.h, back.weighted)
    made = zip((first, second), (given.values1, given.values2), strict=True)
    one, other = (d.to(values.dtype).reshape(values.shape).contiguous() for d, values in made)
    return one, other
