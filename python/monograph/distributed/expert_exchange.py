"""ExpertExchange: a micro-batch of every rank, computed by the owners of its experts. See ops/ep_experts.py.

The bits are those of `experts` in one process: an owner computes one rank's micro-batch in one call, in the
order of its slots, and sends one rounded row for each slot; home sums a token's rows in the order of slots. A
gradient of factors is the sum over one rank's micro-batch: it goes home to it, or, where each rank has the
factors of its own experts alone, stays with the owner, apart from those of other micro-batches. So the sums
over micro-batches have the order that they have elsewhere. Backward sends everything again: nothing is kept
in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from monograph.distributed.expert_group import ExpertGroup
from monograph.distributed.expert_routes import ExpertRoutes, Part, owned
from monograph.ops.argument_checks import dtype_name
from monograph.ops.ep_experts import Served, wanted

_INT = torch.int32  # of rows and experts in messages
_SLOTS_NEED = 6  # x, weights, bias1, bias2, (a1, b1), (a2, b2)
# Who sends what in it depends on what is wanted, which must be the same everywhere.
_BACKWARD = "backward (to x {}, weights {}, first factors {}, second factors {})"


class _Round(NamedTuple):
    """One rank's micro-batch at its owner, and this rank's at another. given: tensors by token or slot that
    came; source: that they came from; to: who serves `part` of this rank's own micro-batch."""

    source: int
    given: list[torch.Tensor]
    to: int
    part: Part


@dataclass(eq=False)
class ExpertExchange:
    """Of one group; `monograph.expert_parallel` makes it."""

    group: ExpertGroup

    @property
    def size(self) -> int:
        return self.group.size

    def held(self, count: int) -> int:
        return len(owned(self.group.rank, self.group.size, count))

    @contextmanager
    def refusing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.group.refuse(error)
            raise

    def _of_owner(self, served: Served) -> list[Any]:
        """The arguments of `experts_slots` behind ids: the factors of this rank's experts alone."""
        own, count = owned(self.group.rank, self.group.size, served.experts), served.experts
        low = []
        for place, t in enumerate(served.factors()):
            if t is not None and served.cut:
                t = t[0]
            elif t is not None and place % 2 == 0:  # [r E, in]
                t = t.reshape(count, -1, t.shape[1])[own.start : own.stop].flatten(0, 1)
            elif t is not None:  # [out, r E], column j E + e
                t = t.reshape(t.shape[0], -1, count)[..., own.start : own.stop].flatten(1)
            low.append(t if t is None else t.contiguous())
        given = list(served.given[3:])
        given[8:12] = low
        return given

    def _rounds(
        self, way: str, served: Served, by_token: Sequence[torch.Tensor], by_slot: Sequence[torch.Tensor]
    ) -> tuple[ExpertRoutes, Iterator[_Round]]:
        """Sends [T, ...] tensors by token, each row once, and flat ones [T k] by slot. Of a round `given` is
        (*by_token, rows, ids, *by_slot)."""
        routes = ExpertRoutes.of(served.given.ids, self.group.size, served.experts)
        sizes = [(len(part.tokens), len(part.slots)) for part in routes.parts]
        came = self.group.counts(_described(way, served, self.held(served.experts)), sizes)
        return routes, self._served_rounds(routes, came, by_token, by_slot)

    def _served_rounds(
        self,
        routes: ExpertRoutes,
        came: list[tuple[int, int]],
        by_token: Sequence[torch.Tensor],
        by_slot: Sequence[torch.Tensor],
    ) -> Iterator[_Round]:
        group = self.group
        for turn in range(group.size):
            source, to = group.serves(turn)
            part, (tokens, slots) = routes.parts[to], came[source]
            group.most_slots = max(group.most_slots, slots)
            rows = [t.index_select(0, part.tokens) for t in by_token]
            flat = [t[part.slots] for t in by_slot]
            if turn == 0:
                yield _Round(source, [*rows, part.rows, part.ids, *flat], to, part)
                continue
            sent = [*rows, torch.stack([part.rows, part.ids]).to(_INT), *flat]
            received = [t.new_empty(tokens, t.shape[1]) for t in by_token]
            received.append(torch.empty(2, slots, dtype=_INT, device=part.rows.device))
            received += [t.new_empty(slots) for t in by_slot]
            group.swap(to, sent, source, received)
            for t in rows:
                group.count_rows(t)
            group.count_beside(*sent[len(rows) :])
            del rows, flat, sent
            index = received.pop(len(by_token)).long()
            received[len(by_token) : len(by_token)] = [index[0], index[1]]
            yield _Round(source, received, to, part)

    def forward(self, served: Served) -> torch.Tensor:
        given = served.given
        with self.refusing():  # what the kernel refuses it refuses for no slots, too
            own, none = self._of_owner(served), given.ids.new_empty(0)
            torch.ops.monograph.experts_slots(given.x[:0].contiguous(), none, none, *own)
        routes, rounds = self._rounds("forward", served, [given.x.contiguous()], [])
        parts = _by_rank(routes, given.x)
        for found in rounds:
            x, rows, ids = found.given
            done = torch.ops.monograph.experts_slots(x, rows, ids, *own)
            self._home(found, [done], [parts[1][found.to]])
        return torch.ops.monograph.combine_slots(parts[0], routes.places, given.weights)

    def _home(self, found: _Round, made: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        """Results go to whose micro-batch it is; those of this rank's own come from who served it."""
        group = self.group
        if found.to == group.rank:
            for target, tensor in zip(into, made, strict=True):
                target.copy_(tensor)
            return
        group.swap(found.source, made, found.to, into)
        group.count_rows(made[0])
        group.count_beside(*made[1:])

    def backward(self, dy: torch.Tensor, served: Served, need: Sequence[bool]) -> tuple[torch.Tensor, ...]:
        given = served.given
        flags = [need[0], need[1], False, False, need[2], need[3]]
        assert len(flags) == _SLOTS_NEED
        weights = given.weights.reshape(-1).contiguous()
        with self.refusing():
            own, none, empty = self._of_owner(served), given.ids.new_empty(0), given.x[:0].contiguous()
            torch.ops.monograph.experts_slots_backward(empty, empty, none, none, weights[:0], *own, flags)
        routes, rounds = self._rounds(
            _BACKWARD.format(*map(int, need)), served, [given.x.contiguous(), dy], [weights]
        )
        like = wanted(served, need)
        low = [None if t is None else t.new_zeros(t.shape) for t in like[2:]]
        dx, dx_parts = _by_rank(routes, given.x if need[0] else given.x[:, :0])
        dweights = torch.zeros_like(weights) if need[1] else weights[:0]
        for found in rounds:
            x, dy_of, rows, ids, of_slots = found.given
            made = torch.ops.monograph.experts_slots_backward(dy_of, x, rows, ids, of_slots, *own, flags)
            slots = found.part.slots
            got = weights.new_empty(len(slots) if need[1] else 0)
            dx_made = made[0] if need[0] else made[0].reshape(len(ids), 0)
            self._home(found, [dx_made, made[1]], [dx_parts[found.to], got])
            if need[1]:
                dweights[slots] = got
            if served.cut:
                for total, piece in zip(low, made[4:], strict=True):
                    if total is not None and len(ids):
                        total[found.source].copy_(piece)
            else:
                self._factors_home(found, made[4:], low, served.experts, bool(len(ids)))
            del made, dx_made
        found_dx = torch.ops.monograph.combine_slots(dx, routes.places, None) if need[0] else dx.new_empty(0)
        found_dw = dweights.reshape(given.weights.shape) if need[1] else given.x.new_empty(0)
        return found_dx, found_dw, *(given.x.new_empty(0) if t is None else t for t in low)

    def _factors_home(
        self,
        found: _Round,
        made: Sequence[torch.Tensor],
        low: Sequence[torch.Tensor | None],
        count: int,
        any_slots: bool,
    ) -> None:
        """Gradients of an owner's factors go to whose micro-batch it is. Without slots they are zero, and
        nothing is sent."""
        group = self.group
        theirs = owned(found.to, group.size, count)
        places = [place for place, t in enumerate(low) if t is not None]
        sent = [made[place] for place in places] if any_slots else []
        views, received = [], []
        for place in places if len(found.part.slots) else []:
            t = low[place]
            assert t is not None
            if place % 2 == 0:
                view = t.view(count, -1, t.shape[1])[theirs.start : theirs.stop]
            else:
                view = t.view(t.shape[0], -1, count)[..., theirs.start : theirs.stop]
            views.append(view)
            received.append(torch.empty(view.shape, dtype=t.dtype, device=t.device))
        if found.to == group.rank:
            received = sent
        else:
            group.swap(found.source, sent, found.to, received)
            group.count_factors(sent)
        for view, tensor in zip(views, received, strict=True):
            view.copy_(tensor.view(view.shape))


def _described(way: str, served: Served, held: int) -> dict[str, str]:
    """What ranks must have alike for an exchange. Tokens and experts may differ."""
    given = served.given
    stacks = [stack.layout for stack in (*given.first_stacks("ep_experts"), given.second_stack("ep_experts"))]
    factors = [
        None
        if a is None or b is None
        else (a.shape[-2] // (held if served.cut else served.experts), a.dtype, b.dtype)
        for a, b in ((given.a1, given.b1), (given.a2, given.b2))
    ]
    biases = [None if t is None else t.dtype for t in (given.bias1, given.bias2)]
    return {
        "call": f"{way} of a layer of {served.experts} experts",
        "x": f"{dtype_name(given.x.dtype)} with {given.x.shape[1]} columns",
        "weights": dtype_name(given.weights.dtype),
        "stacks (format, block, rows, columns)": str([(s.format, s.block, *s.shape[1:]) for s in stacks]),
        "biases": str(biases),
        "factors (rank, dtypes)": f"{factors}, {'cut' if served.cut else 'whole'}",
        "lora_scale1 to transposed": str([float(n) for n in given[15:]]),
    }


def _by_rank(routes: ExpertRoutes, like: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Memory for one row of each slot, and what of it comes from each rank."""
    sizes = [len(part.slots) for part in routes.parts]
    rows = like.new_empty(sum(sizes), like.shape[1])
    return rows, list(rows.split(sizes))
