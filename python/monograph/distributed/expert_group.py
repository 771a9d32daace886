"""ExpertGroup: the ranks that own the experts of a model together, and what they send each other.

An exchange has n rounds: in round j rank r serves the micro-batch of rank r + j, while rank r - j serves its
own. A rank thus has the rows of one micro-batch at a time, whatever the routes are; there is no capacity and
no token is dropped. Before the rounds the ranks tell each other how many rows come, and which exchange this
is: another one on another rank, or one that was refused there, is an error with its name on every rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from monograph.distributed.world import World, alone, gathered_over
from monograph.upstream.collectives import all_gather_into_tensor, all_to_all_single

_REFUSED = -1  # in the place of a call's number
_OP = "ep_experts"


@dataclass
class Sent:
    """What this rank has sent to others. rows: of the size of a hidden state; rows_bytes: of all of them;
    factors: bytes of gradients of factors; beside: numbers of rows and slots and routing weights."""

    calls: int = 0
    rows: int = 0
    rows_bytes: int = 0
    factors: int = 0
    beside: int = 0

    @property
    def all_bytes(self) -> int:
        return self.rows_bytes + self.factors + self.beside


@dataclass(eq=False)
class ExpertGroup:
    """rank of `size` ranks; group: torch's own of them, None for one. made: a hash of what this rank has
    exchanged so far, in order. most_slots: that it has computed at once. place: of this group among all;
    copies: the ranks that own the same experts, one in each group."""

    rank: int
    size: int
    group: Any = None
    sent: Sent = field(default_factory=Sent)
    made: int = 0
    most_slots: int = 0
    place: int = 0
    copies: World = field(default_factory=alone)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertGroup:
        return self

    def counts(self, call: Mapping[str, str], rows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """(tokens, slots) that each rank sends here, for those that go to each. A collective.

        call: what all ranks must have alike, by name; "call" says which one it is.
        """
        self.sent.calls += 1
        number = _number(call)
        if self.size > 1:
            found = self._tables(number, rows)
            if any(other != number for other, _, _ in found):
                self._tell_difference(call)
            rows = [(tokens, slots) for _, tokens, slots in found]
        self.made = hash((self.made, number)) & (2**62 - 1)
        return list(rows)

    def refuse(self, error: Exception) -> None:
        """In the place of `counts`, by a rank that will raise: the others raise too, and do not wait."""
        if self.size > 1:
            self._tables(_REFUSED, [(0, 0)] * self.size)
            gathered_over(self.group, " ".join(str(error).split()))

    def _tables(self, number: int, rows: Sequence[tuple[int, int]]) -> list[list[int]]:
        table = torch.tensor([[number, *pair] for pair in rows])
        sizes = [table.shape[1]] * self.size
        found = all_to_all_single(table.reshape(-1), sizes, sizes, self.group)
        self.sent.beside += (self.size - 1) * table.shape[1] * table.element_size()
        tables: list[list[int]] = found.reshape(self.size, -1).tolist()
        return tables

    def _tell_difference(self, call: Mapping[str, str]) -> NoReturn:
        """Every rank has seen every other's number: all of them come here, or none."""
        told = gathered_over(self.group, dict(call))
        for rank, words in enumerate(told):
            if isinstance(words, str):
                raise RuntimeError(
                    f"{_OP}: rank {rank} has refused its call, and so this one cannot run: {words}"
                )
        for rank, words in enumerate(told):
            for name in (*call, *words):
                own, other = call.get(name, "missing"), words.get(name, "missing")
                if own != other:
                    raise RuntimeError(
                        f"{_OP}: {name} is {own} on rank {self.rank} and {other} on rank {rank}; wanted the "
                        "same calls in the same order on every rank"
                    )
        raise RuntimeError(f"{_OP}: the calls of the ranks differ, wanted the same on every rank")

    def serves(self, turn: int) -> tuple[int, int]:
        """In a round: (the rank that this one serves, the rank that serves this one)."""
        return (self.rank + turn) % self.size, (self.rank - turn) % self.size

    def swap(
        self, to: int, sent: Sequence[torch.Tensor], source: int, received: Sequence[torch.Tensor]
    ) -> None:
        """Sends tensors to one rank and receives others from one, into contiguous memory. Empty ones are not
        sent: both sides know their sizes."""
        waiting: list[Any] = []
        for tag, tensor in enumerate(received):
            if tensor.numel():
                waiting.append(dist.irecv(tensor, group=self.group, group_src=source, tag=tag))
        kept = [tensor.contiguous() for tensor in sent]
        for tag, tensor in enumerate(kept):
            if tensor.numel():
                waiting.append(dist.isend(tensor, group=self.group, group_dst=to, tag=tag))
        for work in waiting:
            work.wait()

    def gathered(self, numbers: torch.Tensor) -> torch.Tensor:
        """A few numbers of every rank, [size, n]. A collective."""
        if self.size == 1:
            return numbers[None]
        return all_gather_into_tensor(numbers, self.size, self.group).view(self.size, -1)

    def count_rows(self, tensor: torch.Tensor) -> None:
        self.sent.rows += tensor.shape[0]
        self.sent.rows_bytes += tensor.nbytes

    def count_beside(self, *tensors: torch.Tensor) -> None:
        self.sent.beside += sum(tensor.nbytes for tensor in tensors)

    def count_factors(self, tensors: Sequence[torch.Tensor]) -> None:
        self.sent.factors += sum(tensor.nbytes for tensor in tensors)


def _number(call: Mapping[str, str]) -> int:
    """0 or more, of 62 bits."""
    digest = hashlib.sha256(repr(sorted(call.items())).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2
