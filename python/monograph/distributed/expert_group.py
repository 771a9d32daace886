"""ExpertGroup: the ranks that own the experts of a model together, and what they send each other.

An exchange has n rounds: in round j rank r serves the micro-batch of rank r + j, while rank r - j serves its
own. A rank thus has the rows of one micro-batch at a time, whatever the routes are; there is no capacity and
no token is dropped. Before the rounds the ranks tell each other how many rows come, and which exchange this
is: another one on another rank is an error with its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from monograph.upstream.collectives import all_to_all_single

WAYS = {0: "forward", 1: "backward"}


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
    exchanged so far, in order. most_slots: that it has computed at once."""

    rank: int
    size: int
    group: Any = None
    sent: Sent = field(default_factory=Sent)
    made: int = 0
    most_slots: int = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertGroup:
        return self

    def counts(self, way: int, kind: Sequence[int], rows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """(tokens, slots) that each rank sends here, for those that go to each. A collective.

        way: a key of WAYS. kind: what all ranks have alike: hidden size, experts, bits of a number.
        """
        self.sent.calls += 1
        self.made = hash((self.made, way, *kind)) & (2**62 - 1)
        if self.size == 1:
            return list(rows)
        own = [way, *kind]
        table = torch.tensor([[*own, *pair] for pair in rows])
        width = table.shape[1]
        sizes = [width] * self.size
        found = all_to_all_single(table.reshape(-1), sizes, sizes, self.group).reshape(self.size, width)
        self.sent.beside += (self.size - 1) * width * table.element_size()
        for other, numbers in enumerate(found.tolist()):
            if numbers[: len(own)] != own:
                raise RuntimeError(
                    f"ep_experts: rank {self.rank} is in the {_words(own)}, and rank {other} in the "
                    f"{_words(numbers)}; wanted the same calls in the same order on every rank"
                )
        return [(tokens, slots) for tokens, slots in found[:, len(own) :].tolist()]

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

    def count_rows(self, tensor: torch.Tensor) -> None:
        self.sent.rows += tensor.shape[0]
        self.sent.rows_bytes += tensor.nbytes

    def count_beside(self, *tensors: torch.Tensor) -> None:
        self.sent.beside += sum(tensor.nbytes for tensor in tensors)

    def count_factors(self, tensors: Sequence[torch.Tensor]) -> None:
        self.sent.factors += sum(tensor.nbytes for tensor in tensors)


def _words(numbers: Sequence[int]) -> str:
    way, hidden, count, bits, *_ = numbers
    return f"{WAYS.get(way, way)} of a layer of {count} experts with {hidden} columns of {bits} bits"
