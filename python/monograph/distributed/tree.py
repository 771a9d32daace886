"""A sum over the micro-batches of a step in an order that does not depend on the number of ranks.

    order = Order.of(micro_batches=12, leaves=12, rank=world.rank, ranks=world.size)
    total = TreeSum(order.sums)
    for index in order.own:
        total.add(gradient_of(index))
    gradient = sum_over_ranks(total.parts, length, order, world)

Addition of floats is not associative, so the order is part of the result. Here it is a binary tree over V
leaves: [a, b) is the sum of [a, m) and [m, b), m = a + (b - a) // 2, down to single leaves; of an empty half
nothing is added. Leaf i is the sum of the micro-batches [i * M // V, (i + 1) * M // V), one after the other.
Rank r of W has the leaves [r * V // W, (r + 1) * V // W). It sums what subtrees it has whole; their roots are
summed over the ranks in the tree's order. By halves, 2 and 4 ranks have one root each in nearly all cases, so
that no more is sent than in an all_reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from monograph.distributed.world import World
from monograph.upstream import collectives

# Numbers of a gradient that are exchanged at once outside of graphs: 4 MiB are still in a cache when they are
# summed, and what collectives allocate is memory that was used before.
CHUNK = 2**20
LEAST_SHARE = 2**16  # of one rank: with thousands of them a chunk's messages would be tiny


@dataclass(frozen=True)
class Tree:
    """V leaves over M micro-batches. A node [a, b) of leaves is named by its micro-batches."""

    micro_batches: int
    leaves: int

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise ValueError(f"micro_batches is {self.micro_batches}, wanted 1 or more")
        if self.leaves < 1:
            raise ValueError(f"virtual_shards is {self.leaves}, wanted 1 or more")

    def node(self, begin: int, end: int) -> range:
        """The micro-batches of the leaves [begin, end)."""
        return range(begin * self.micro_batches // self.leaves, end * self.micro_batches // self.leaves)

    def own(self, rank: int, ranks: int) -> range:
        """The micro-batches of a rank."""
        return self.node(rank * self.leaves // ranks, (rank + 1) * self.leaves // ranks)

    def roots(self, own: range) -> list[range]:
        """The largest nodes whose micro-batches all are in `own`, in order."""
        return list(self._roots(own, 0, self.leaves))

    def _roots(self, own: range, begin: int, end: int) -> list[range]:
        node = self.node(begin, end)
        if not node or node.stop <= own.start or node.start >= own.stop:
            return []
        if own.start <= node.start and node.stop <= own.stop:
            return [node]
        middle = begin + (end - begin) // 2
        return self._roots(own, begin, middle) + self._roots(own, middle, end)

    def sums(self, items: Sequence[range]) -> list[int]:
        """`items` are neighbouring nodes, or single micro-batches. On a stack to which they come in order:
        how often, after each, the two uppermost are replaced by their sum."""
        found = [0] * len(items)
        if items:
            places = {item.stop: place for place, item in enumerate(items)}
            whole = range(items[0].start, items[-1].stop)
            self._sums(found, places, set(items), whole, 0, self.leaves)
        return found

    def _sums(
        self,
        found: list[int],
        places: dict[int, int],
        items: set[range],
        whole: range,
        begin: int,
        end: int,
    ) -> None:
        node = self.node(begin, end)
        if not node or node in items or node.stop <= whole.start or node.start >= whole.stop:
            return
        if end - begin == 1:
            for index in node[1:]:
                found[places[index + 1]] += 1
            return
        middle = begin + (end - begin) // 2
        self._sums(found, places, items, whole, begin, middle)
        self._sums(found, places, items, whole, middle, end)
        halves = self.node(begin, middle) and self.node(middle, end)
        if halves and whole.start <= node.start and node.stop <= whole.stop:
            found[places[node.stop]] += 1


@dataclass(frozen=True)
class Order:
    """What one rank has to know of the tree. Plain numbers: a graph holds them as constants.

    own: its micro-batches; sums: how often is summed after each; roots: how many roots each rank has;
    root_sums: how often is summed after each root of all ranks; most: micro-batches of the rank that has the
    most.
    """

    own: range
    sums: tuple[int, ...]
    roots: tuple[int, ...]
    root_sums: tuple[int, ...]
    most: int
    one_each: bool  # every rank has one micro-batch

    @staticmethod
    @lru_cache(maxsize=64)
    def of(micro_batches: int, leaves: int, rank: int, ranks: int) -> Order:
        tree = Tree(micro_batches, leaves)
        owns = [tree.own(other, ranks) for other in range(ranks)]
        roots = [tree.roots(own) for own in owns]
        sizes = [len(own) for own in owns]
        return Order(
            own=owns[rank],
            sums=tuple(tree.sums([range(m, m + 1) for m in owns[rank]])),
            roots=tuple(len(own) for own in roots),
            root_sums=tuple(tree.sums([root for own in roots for root in own])),
            most=max(sizes),
            one_each=min(sizes) == max(sizes) == 1,
        )


class TreeSum:
    """Sums tensors as they come, as `sums` says (Tree.sums). It owns them: the first of two is written to.

    At most 1 + log2 of their number are alive, rounded up, and those behind the last sum are the roots.
    """

    def __init__(self, sums: Sequence[int]) -> None:
        self._sums = iter(sums)
        self.parts: list[torch.Tensor] = []

    def add(self, part: torch.Tensor) -> None:
        self.parts.append(part)
        for _ in range(next(self._sums)):
            right = self.parts.pop()
            left = self.parts.pop()
            # Writing to slices would copy the whole in a graph.
            self.parts.append(left + right if torch.compiler.is_compiling() else left.add_(right))


def padded(length: int, ranks: int) -> int:
    """The least length that all ranks have an equal share of."""
    return -(-length // ranks) * ranks


def chunk_length(ranks: int) -> int:
    """How many numbers are summed over ranks at a time, outside of a graph."""
    return padded(max(CHUNK, LEAST_SHARE * ranks), ranks)


def sum_over_ranks(
    parts: Sequence[torch.Tensor],
    length: int,
    order: Order,
    world: World,
    device: torch.device | None = None,
) -> torch.Tensor:
    """The sum of all roots, [length], the same bits on every rank.

    parts: this rank's roots, float32 [length], which are written to: outside of a graph the sum takes the
    place of the first. length: one that `padded` gives. device: of the parts, for a rank that has none; None:
    the one that the group carries. Each number of a root is sent once, and each sum once to every other rank.
    """
    if world.size == 1:
        return parts[0]
    if length % world.size:
        raise ValueError(f"length is {length}, wanted a multiple of {world.size}, the number of ranks")
    if order.roots == (1, 1):
        # The sum of two numbers has no order: all_reduce is the tree.
        return collectives.all_reduce(parts[0], world.group)
    if not parts and device is None:
        device = world.device
    if torch.compiler.is_compiling():
        own = _own_slice(parts, length, order, world, device)
        return collectives.all_gather_into_tensor(own, world.size, world.group)
    total = parts[0] if parts else torch.empty(length, device=device)
    step = chunk_length(world.size)
    for begin in range(0, length, step):
        size = min(step, length - begin)
        own = _own_slice([part.narrow(0, begin, size) for part in parts], size, order, world, device)
        collectives.all_gather_to(total.narrow(0, begin, size), own, world.size, world.group)
    return total


def _own_slice(
    parts: Sequence[torch.Tensor], length: int, order: Order, world: World, device: torch.device | None
) -> torch.Tensor:
    """The sum of this rank's slice of all roots, [length / ranks]."""
    share = length // world.size
    if len(parts) == 1:
        sent = parts[0]
    elif parts:
        # For each rank its slices of all parts.
        sent = torch.stack([part.view(world.size, share) for part in parts], 1).view(-1)
    else:
        sent = torch.empty(0, device=device)
    received = collectives.all_to_all_single(
        sent, [count * share for count in order.roots], [len(parts) * share] * world.size, world.group
    )
    total = TreeSum(order.root_sums)
    for part in received.split(share):
        total.add(part)
    return total.parts[0]
