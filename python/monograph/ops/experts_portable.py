"""monograph::experts in aten operations, for any device: sizes depend on shapes alone, never on the routes.

Slots are sorted by expert and cut into blocks of one size; each expert begins a new block, so that there are
at most slots / size + experts of them. A block takes its expert by a tensor index: nothing is read back from
the device, and of a packed weight one expert at a time is dense. With blocks of slots / experts rows at most
twice the rows that are routed are multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from monograph.ops.experts_activation import activate, activate_backward
from monograph.ops.experts_arguments import Activation, ExpertsArguments, check_experts, check_gradient
from monograph.ops.experts_weight import StackDecoder


@dataclass(frozen=True)
class Blocks:
    """`order` [S] has the slots by expert, those that are skipped last. The rest is one entry per block."""

    order: torch.Tensor
    experts: torch.Tensor  # [blocks]
    rows: torch.Tensor  # [blocks, size] of the sorted slots; 0 where the block has no more
    inside: torch.Tensor  # [blocks, size]


def sort_slots(ids: torch.Tensor, experts: int) -> Blocks:
    slots = ids.numel()
    key = torch.where((ids >= 0) & (ids < experts), ids, experts).reshape(-1)
    key, order = torch.sort(key, stable=True)
    starts = torch.searchsorted(key, torch.arange(experts + 1, device=ids.device))
    size = max(-(-slots // max(experts, 1)), 1)
    ends = torch.cumsum((starts.diff() + size - 1) // size, 0)  # blocks up to and with each expert
    number = torch.arange(slots // size + min(experts, slots), device=ids.device)
    expert = torch.searchsorted(ends, number, right=True)
    used = expert < experts
    expert = expert.clamp(max=max(experts - 1, 0))
    within = number - torch.cat([ends.new_zeros(1), ends])[expert]
    rows = (starts[expert] + within * size)[:, None] + torch.arange(size, device=ids.device)
    inside = used[:, None] & (rows < starts[expert + 1][:, None])
    return Blocks(order, expert, torch.where(inside, rows, 0), inside)


class Projection:
    """One of the two products: what an expert, given as a tensor [1], has of it."""

    def __init__(self, given: ExpertsArguments, second: bool, shape: tuple[int, int, int]) -> None:
        pick = "2" if second else "1"
        self.experts, self.rows, self.cols = shape
        self.kind = given.x.dtype
        self.wide = torch.float64 if self.kind == torch.float64 else torch.float32
        stacks = [given.second_stack("experts")] if second else given.first_stacks("experts")
        self.stacks = [StackDecoder(stack, given.transposed, self.kind, self.wide) for stack in stacks]
        self.a, self.b = getattr(given, f"a{pick}"), getattr(given, f"b{pick}")
        self.bias: torch.Tensor | None = getattr(given, f"bias{pick}")
        self.scale: float = getattr(given, f"lora_scale{pick}")
        self.interleaved = given.interleaved

    def weight(self, expert: torch.Tensor) -> torch.Tensor:
        """[rows, cols]."""
        parts = [stack.weight(expert) for stack in self.stacks]
        if len(parts) == 2 and self.interleaved:
            return torch.stack(parts, 1).flatten(0, 1)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def factors(self, expert: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """a [r, cols] and b [rows, r], rounded to the dtype of x and widened again."""
        if self.a is None or self.b is None:
            return None
        a = self.a.reshape(self.experts, -1, self.cols).index_select(0, expert)[0]
        b = self.b.reshape(self.rows, -1, self.experts).index_select(2, expert)[..., 0]
        return a.to(self.kind).to(self.wide), b.to(self.kind).to(self.wide)

    def low(self, inputs: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """u = scale * inputs a^T, rounded to the dtype of x."""
        return (self.scale * (inputs @ a.t())).to(self.kind).to(self.wide)

    def forward(self, inputs: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        y = inputs @ self.weight(expert).t()
        factors = self.factors(expert)
        if factors is not None:
            y = y + self.low(inputs, factors[0]) @ factors[1].t()
        if self.bias is not None:
            y = y + self.bias.index_select(0, expert).to(self.wide)
        return y.to(self.kind)

    def input_gradient(self, dy: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        dx = dy @ self.weight(expert)
        factors = self.factors(expert)
        return dx if factors is None else dx + self.low(dy, factors[1].t()) @ factors[0]


def projections(given: ExpertsArguments, sizes: tuple[int, int, int]) -> tuple[Projection, Projection]:
    experts, rows, hidden = sizes
    inner = rows // 2 if Activation(given.activation).gated else rows
    return (
        Projection(given, False, (experts, rows, hidden)),
        Projection(given, True, (experts, hidden, inner)),
    )


def portable_experts(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator, one block of slots and one dense expert at a time; products in float32."""
    *rest, save = arguments
    given = ExpertsArguments(*rest)  # type: ignore[arg-type]
    sizes = check_experts("experts", given)
    first, second = projections(given, sizes)
    x, slots, kind, wide = given.x, given.slots, given.x.dtype, first.wide
    pre = x.new_zeros(slots + 1, first.rows)  # the last row takes what no slot wants
    down = x.new_zeros(slots + 1, second.rows)  # in the order of slots
    if prod((slots, first.experts)):
        blocks, k = sort_slots(given.ids, first.experts), given.ids.shape[1]
        for b in range(blocks.experts.shape[0]):
            expert, rows, inside = blocks.experts[b : b + 1], blocks.rows[b], blocks.inside[b]
            slot = blocks.order[rows]
            own = first.forward(x[slot // k].to(wide), expert)
            h = activate(own.to(wide), given).to(kind)
            pre[torch.where(inside, rows, slots)] = own
            down[torch.where(inside, slot, slots)] = second.forward(h.to(wide), expert)
    weighted = down[:slots].reshape(*given.ids.shape, second.rows).to(wide)
    y = x.new_zeros(x.shape[0], second.rows, dtype=wide)
    for j in range(given.ids.shape[1]):  # in the order of slots
        inside = ((given.ids[:, j] >= 0) & (given.ids[:, j] < first.experts))[:, None]
        part = weighted[:, j] * given.weights[:, j, None].to(wide)
        y = y + torch.where(inside, part, 0)
    return y.to(kind), pre[:slots] if save else x.new_empty(0, first.rows)


class Gradients:
    """What a walk over the blocks collects, in float32."""

    def __init__(self, given: ExpertsArguments, first: Projection, second: Projection) -> None:
        self.given, self.first, self.second = given, first, second
        wide, x = first.wide, given.x
        self.dx = x.new_zeros(given.slots + 1, first.cols, dtype=wide)
        self.dweights = x.new_zeros(given.slots + 1, dtype=wide)
        self.bias = [x.new_zeros(p.experts, p.rows, dtype=wide) for p in (first, second)]
        ranks = [0 if p.a is None else p.a.shape[0] // p.experts for p in (first, second)]
        pairs = list(zip((first, second), ranks, strict=True))
        self.a = [x.new_zeros(p.experts, r, p.cols, dtype=wide) for p, r in pairs]
        self.b = [x.new_zeros(p.experts, p.rows, r, dtype=wide) for p, r in pairs]
        self.dense: list[torch.Tensor] = []

    def want_dense(self) -> None:
        wide, x = self.first.wide, self.given.x
        self.dense = [x.new_zeros(p.experts, p.rows, p.cols, dtype=wide) for p in (self.first, self.second)]

    def _add(self, which: int, expert: torch.Tensor, inputs: torch.Tensor, dy: torch.Tensor) -> None:
        """What a projection takes from rows: its bias, its factors, its weight."""
        part = (self.first, self.second)[which]
        self.bias[which].index_add_(0, expert, dy.sum(0, keepdim=True))
        factors = part.factors(expert)
        if factors is not None:
            a, b = factors
            self.b[which].index_add_(0, expert, (dy.t() @ part.low(inputs, a))[None])
            self.a[which].index_add_(0, expert, (part.low(dy, b.t()).t() @ inputs)[None])
        if self.dense:
            self.dense[which].index_add_(0, expert, (dy.t() @ inputs)[None])

    def walk(self, dy: torch.Tensor, saved: torch.Tensor) -> None:
        given, first, second = self.given, self.first, self.second
        kind, wide, slots, k = given.x.dtype, first.wide, given.slots, given.ids.shape[1]
        blocks = sort_slots(given.ids, first.experts)
        for b in range(blocks.experts.shape[0]):
            expert, rows, inside = blocks.experts[b : b + 1], blocks.rows[b], blocks.inside[b]
            slot, here = blocks.order[rows], inside[:, None]
            x = torch.where(here, given.x[slot // k], 0).to(wide)
            up = torch.where(here, dy[slot // k], 0).to(wide)
            weight = given.weights.reshape(-1)[slot, None].to(wide)
            pre = saved[rows] if saved.shape[0] else first.forward(x, expert)
            pre = torch.where(here, pre, 0).to(wide)
            h = activate(pre, given).to(kind).to(wide)
            dh = second.input_gradient(up, expert)
            dpre = torch.where(here, activate_backward(weight * dh, pre, given), 0).to(kind).to(wide)
            share = (h * dh).sum(1)
            if second.bias is not None:
                share = share + (second.bias.index_select(0, expert).to(wide) * up).sum(1)
            to = torch.where(inside, slot, slots)
            self.dweights[to] = share
            self.dx[to] = first.input_gradient(dpre, expert)
            self._add(0, expert, x, dpre)
            self._add(1, expert, torch.where(here, h, 0), torch.where(here, weight * up, 0))


def gradients(
    op: str, dy: torch.Tensor, pre: torch.Tensor, given: ExpertsArguments, dense: bool
) -> Gradients:
    found = Gradients(given, *projections(given, check_gradient(op, dy, pre, given)))
    if dense:
        found.want_dense()
    if given.slots and found.first.experts:
        found.walk(dy, pre)
    return found
