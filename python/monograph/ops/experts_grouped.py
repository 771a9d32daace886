"""Products of sorted slots with their experts' weights by torch's `grouped_mm`, for `experts_torch.py`.

Of a packed weight some experts at a time are dense, PANEL_BYTES of them. The loop runs over as many experts
as may be active, min(E, slots): shapes decide how often, and the host reads nothing. Active experts come
first; the places behind them decode the last active one again, so that no bytes of an inactive expert are
read. A plain weight of the dtype of x is multiplied where it lies.

grouped_mm wants strides of 16 bytes: odd sizes and ranks are padded with zeros. It leaves rows behind the
last offset as memory was found: they are set to 0.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import grouped_mm, pad

from monograph.ops.experts_arguments import Activation, ExpertsArguments
from monograph.ops.experts_weight import StackDecoder
from monograph.ops.layout import PLAIN

PANEL_BYTES = 1 << 28  # of dense experts at a time; one expert, if it is larger
_STRIDE = 16  # bytes


def _even(t: torch.Tensor, *dims: int) -> torch.Tensor:
    """Zeros behind `dims`, the last two or one of them, so that rows of both fill whole strides."""
    multiple = _STRIDE // t.element_size()
    more = [-t.shape[dim] % multiple if dim in dims else 0 for dim in (-1, -2)]
    return pad(t, (0, more[0], 0, more[1])) if any(more) else t


class Routes:
    """Slots sorted by expert, those that are skipped last."""

    def __init__(self, ids: torch.Tensor, experts: int) -> None:
        key = torch.where((ids >= 0) & (ids < experts), ids, experts).reshape(-1)
        key, self.order = torch.sort(key, stable=True)
        self.place = torch.arange(key.numel(), device=ids.device)
        self.back = torch.empty_like(self.order).scatter_(0, self.order, self.place)  # of each slot
        self.inside = (key < experts)[:, None]
        self.expert = key.clamp(max=experts - 1)
        ends = torch.searchsorted(key, torch.arange(experts, device=ids.device), right=True)
        self.counts = ends.diff(prepend=ends.new_zeros(1))
        self.ends = ends.to(torch.int32)
        # Experts with tokens first, in their order: that of the sorted slots.
        self.most = min(experts, key.numel())
        idle = (self.counts == 0).to(torch.int8)
        self.turns = torch.sort(idle, stable=True).indices[: self.most]
        last = ((self.counts > 0).sum() - 1).clamp(min=0)
        self.read = self.turns[torch.minimum(self.turns.new_ones(self.most).cumsum(0) - 1, last)]

    def product(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """rows [S, n] times weights [E, n, m]: [S, m], anything where a slot is skipped."""
        return grouped_mm(rows, weights, offs=self.ends)

    def gram(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Of each expert left^T right over its rows: [E, n, m]."""
        found = grouped_mm(left.t(), right, offs=self.ends)
        return torch.where(self.counts[:, None, None] > 0, found, 0)

    def sums(self, rows: torch.Tensor) -> torch.Tensor:
        """Of each expert the sum of its rows: [E, n]."""
        ones = rows.new_ones(rows.shape[0], _STRIDE // rows.element_size())
        return self.gram(_even(rows, -1), ones)[:, : rows.shape[1], 0]

    def to_slots(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.index_select(0, self.back)


class GroupedProduct:
    """One of the two products of a layer, and its low-rank part."""

    def __init__(
        self, given: ExpertsArguments, second: bool, shape: tuple[int, int, int], routes: Routes
    ) -> None:
        pick = "2" if second else "1"
        self.experts, self.rows, self.cols = shape
        self.routes, self.kind = routes, given.x.dtype
        self.stacks = [given.second_stack("experts")] if second else given.first_stacks("experts")
        self.transposed, self.interleaved = given.transposed, given.interleaved
        self.bias: torch.Tensor | None = getattr(given, f"bias{pick}")
        self.scale: float = getattr(given, f"lora_scale{pick}")
        a, b = getattr(given, f"a{pick}"), getattr(given, f"b{pick}")
        self.rank = 0 if a is None else a.shape[0] // self.experts
        if self.rank:
            self.a = _even(a.reshape(self.experts, self.rank, self.cols).to(self.kind), -1, -2)
            b = b.reshape(self.rows, self.rank, self.experts).permute(2, 0, 1)
            self.b = _even(b.to(self.kind).contiguous(), -1, -2)

    def _whole(self) -> torch.Tensor | None:
        """The weight of all experts, [E, rows, cols], if it lies there as it is wanted."""
        stack = self.stacks[0]
        if stack.layout.format != PLAIN or stack.values.dtype != self.kind:
            return None
        shape = (self.cols, self.rows) if self.transposed else (self.rows, self.cols)
        values = stack.values.reshape(self.experts, *shape)
        off = values.storage_offset() * values.element_size()
        if off % _STRIDE or _even(values[:0], -1, -2).shape[1:] != values.shape[1:]:
            return None
        return values.transpose(1, 2) if self.transposed else values

    def _panels(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Dense experts [n, rows, cols], the ends of their rows, and which sorted row is the first of these:
        None for row 0."""
        routes = self.routes
        if (whole := self._whole()) is not None:
            yield whole, routes.ends, None
            return
        decoders = [StackDecoder(stack, self.transposed, self.kind, self.kind) for stack in self.stacks]
        size = self.rows * self.cols * self.kind.itemsize
        count = min(max(PANEL_BYTES // max(size, 1), 1), routes.most)
        counts = routes.counts[routes.turns]
        ends = counts.cumsum(0)
        for first in range(0, routes.most, count):
            read = routes.read[first : first + count]
            start = ends[first - 1] if first else None
            own = ends[first : first + count] - (0 if start is None else start)
            yield _even(self._dense(decoders, read), -1, -2), own.to(torch.int32), start

    def _dense(self, decoders: list[StackDecoder], read: torch.Tensor) -> torch.Tensor:
        parts = [decoder.weights(read) for decoder in decoders]
        if len(parts) == 1:
            return parts[0]
        return torch.stack(parts, 2).flatten(1, 2) if self.interleaved else torch.cat(parts, 1)

    def _times(self, rows: torch.Tensor, forward: bool) -> torch.Tensor:
        """rows W^T of each expert, or rows W; 0 where a slot is skipped."""
        routes, width = self.routes, self.rows if forward else self.cols
        rows, slots = _even(rows, -1), rows.shape[0]
        out: torch.Tensor | None = None
        for dense, ends, start in self._panels():
            weights = dense.transpose(1, 2) if forward else dense
            if start is None and ends.numel() >= routes.most:
                out = grouped_mm(rows, weights, offs=ends)
                break
            if out is None:
                out = rows.new_empty(
                    slots + 1, weights.shape[2]
                )  # the last row takes what is of no slot here
            begin = routes.place if start is None else routes.place + start
            here = grouped_mm(rows.index_select(0, begin.clamp(max=slots - 1)), weights, offs=ends)
            out[torch.where(routes.place < ends[-1], begin, slots)] = here
            del dense, weights, here
        assert out is not None
        return out[:slots, :width].masked_fill_(~routes.inside, 0)

    def low(self, rows: torch.Tensor) -> torch.Tensor:
        """u = scale rows a^T, [S, rank] with zeros behind."""
        return self.routes.product(_even(rows, -1), self.a.transpose(1, 2)).mul_(self.scale)

    def low_gradient(self, dy: torch.Tensor) -> torch.Tensor:
        """du = scale dy b."""
        return self.routes.product(_even(dy, -1), self.b).mul_(self.scale)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        y = self._times(rows, forward=True)
        if self.rank:
            y += self.routes.product(self.low(rows), self.b.transpose(1, 2))[:, : self.rows]
        if self.bias is not None:
            y += self.bias.index_select(0, self.routes.expert)
        return y.masked_fill_(~self.routes.inside, 0)

    def input_gradient(self, dy: torch.Tensor) -> torch.Tensor:
        dx = self._times(dy, forward=False)
        if self.rank:
            dx += self.routes.product(self.low_gradient(dy), self.a)[:, : self.cols]
        return dx.masked_fill_(~self.routes.inside, 0)

    def factor_gradients(self, rows: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a and b as PEFT has them, [r E, cols] and [rows, r E]."""
        db = self.routes.gram(_even(dy, -1), self.low(rows))
        da = self.routes.gram(self.low_gradient(dy), _even(rows, -1))
        da, db = da[:, : self.rank, : self.cols], db[:, : self.rows, : self.rank]
        return da.flatten(0, 1), db.permute(1, 2, 0).flatten(1)

    def weight_gradient(self, rows: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        """Of a plain weight, in its shape."""
        left, right = (rows, dy) if self.transposed else (dy, rows)
        found = self.routes.gram(_even(left, -1), _even(right, -1))
        return found[:, : left.shape[1], : right.shape[1]]


def grouped_products(
    given: ExpertsArguments, sizes: tuple[int, int, int]
) -> tuple[GroupedProduct, GroupedProduct, Routes]:
    experts, rows, hidden = sizes
    inner = rows // 2 if Activation(given.activation).gated else rows
    routes = Routes(given.ids, experts)
    first = GroupedProduct(given, False, (experts, rows, hidden), routes)
    return first, GroupedProduct(given, True, (experts, hidden, inner), routes), routes
