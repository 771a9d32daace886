"""The tree of sums: every micro-batch once, one shape for any number of ranks, the bits of a recursion."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch

from monograph.distributed import Order, Tree, TreeSum, World, alone, padded, sum_over_ranks
from support.run_ranks import run_ranks, smaller_worlds

# Micro-batches, leaves, length: V = 12 in several sizes, ranks without leaves, leaves without micro-batches,
# leaves of several micro-batches, one of each.
CASES = [
    (12, 12, 1000),
    (12, 12, 1),
    (12, 12, 4097),
    (2, 2, 33),
    (3, 3, 33),
    (1, 1, 10),
    (7, 7, 77),
    (5, 12, 100),
    (1, 12, 9),
    (12, 5, 100),
    (29, 3, 11),
    (16, 16, 640),
    (13, 13, 55),
]


def value(index: int, length: int) -> torch.Tensor:
    """Of five magnitudes, so that every order of summing gives other bits."""
    generator = torch.Generator().manual_seed(index)
    return torch.randn(length, generator=generator) * 10.0 ** (index % 5 - 2)


def reference(micro_batches: int, leaves: int, length: int) -> torch.Tensor:
    """The definition: leaves in order, then halves."""

    def leaf(i):
        inside = range(i * micro_batches // leaves, (i + 1) * micro_batches // leaves)
        values = [value(index, length) for index in inside]
        return sum(values[1:], values[0]) if values else None

    def halves(a, b):
        if b - a == 1:
            return leaf(a)
        m = a + (b - a) // 2
        found = [half for half in (halves(a, m), halves(m, b)) if half is not None]
        return found[0] + found[1] if len(found) == 2 else (found or [None])[0]

    return halves(0, leaves)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def summed(world: World, micro_batches: int, leaves: int, length: int) -> torch.Tensor:
    order = Order.of(micro_batches, leaves, world.rank, world.size)
    size = padded(length, world.size)
    total = TreeSum(order.sums)
    for index in order.own:
        total.add(torch.nn.functional.pad(value(index, length), (0, size - length)))
    return sum_over_ranks(total.parts, size, order, world)[:length]


def hashes(world: World) -> dict[str, list[str]]:
    """Outside of a graph and inside, and what an all_reduce of the ranks' own sums gives."""
    eager = [digest(summed(world, *case)) for case in CASES]
    graph = []
    generated = [(3, 3, 1000, "inductor")] if world.size == 3 else []
    for *case, backend in [
        (world.size, world.size, 1000, "aot_eager"),
        (world.size, 12, 7, "aot_eager"),
        *generated,
    ]:
        order = Order.of(case[0], case[1], world.rank, world.size)
        size = padded(case[2], world.size)

        def inside(part, order=order, size=size):
            return sum_over_ranks([part * 1.0], size, order, world) * 1.0

        part = torch.nn.functional.pad(value(world.rank, case[2]), (0, size - case[2]))
        torch._dynamo.reset()
        # Three ranks also with generated code: it must not sum in another order.
        compiled = torch.compile(inside, fullgraph=True, backend=backend)
        graph.append(digest(compiled(part)[: case[2]]) == digest(reference(*case)))
    plain = torch.zeros(1000)
    for index in Tree(12, 12).own(world.rank, world.size):
        plain += value(index, 1000)
    torch.distributed.all_reduce(plain, group=world.group)
    return {"eager": eager, "graph": graph, "all_reduce": digest(plain)}


@pytest.fixture(scope="module")
def wanted():
    return [digest(reference(*case)) for case in CASES]


def all_hashes(world: World) -> dict[int, dict[str, list[str]]]:
    return {own.size: hashes(own) for own in smaller_worlds(world, [4, 3, 2])}


@pytest.fixture(scope="module")
def on_ranks():
    return run_ranks(4, "distributed/test_tree:all_hashes")


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3, 4])
def test_the_bits_are_those_of_the_recursion(ranks, wanted, on_ranks):
    """On every rank, for every case: one hash, that of a plain recursion on one process."""
    for result in on_ranks[:ranks]:
        found = result[str(ranks)]
        assert found["eager"] == wanted
        assert all(found["graph"])
        assert len(found["graph"]) == (3 if ranks == 3 else 2)
        assert ranks == 2 or found["all_reduce"] != wanted[0]  # two sums of six each have another order too


def test_one_process_is_the_same_code(wanted):
    assert [digest(summed(alone(), *case)) for case in CASES] == wanted


def test_one_process_copies_nothing():
    """The sum is the memory of the first part."""
    parts = [value(index, 100) for index in range(12)]
    order = Order.of(12, 12, 0, 1)
    total = TreeSum(order.sums)
    for part in parts:
        total.add(part)
    assert sum_over_ranks(total.parts, 100, order, alone()).data_ptr() == parts[0].data_ptr()


class Node:
    """What stands for a tensor: the tree of names below it."""

    def __init__(self, name):
        self.name = name

    def add_(self, other):
        self.name = (self.name, other.name)
        return self


def names(micro_batches: int, leaves: int):
    """The tree as nested pairs, by the definition."""
    inside = [range(i * micro_batches // leaves, (i + 1) * micro_batches // leaves) for i in range(leaves)]

    def one(numbers):
        found = numbers[0]
        for number in numbers[1:]:
            found = (found, number)
        return found

    def halves(parts):
        if len(parts) == 1:
            return one(parts[0]) if parts[0] else None
        middle = len(parts) // 2
        found = [half for half in (halves(parts[:middle]), halves(parts[middle:])) if half is not None]
        return tuple(found) if len(found) == 2 else (found or [None])[0]

    return halves(inside)


@pytest.mark.parametrize("leaves", range(1, 41))
def test_every_micro_batch_is_once_in_whole_subtrees(leaves):
    """All V to 40, W to 8, and M below, at and above V: whose they are, how they are summed, how many are
    alive."""
    for micro_batches in sorted({1, leaves // 3 + 1, leaves, leaves + 7}):
        want = names(micro_batches, leaves)
        for ranks in range(1, 9):
            orders = [Order.of(micro_batches, leaves, rank, ranks) for rank in range(ranks)]
            assert [m for order in orders for m in order.own] == list(range(micro_batches))
            roots = []
            for rank, order in enumerate(orders):
                own = [leaf for leaf in range(rank * leaves // ranks, (rank + 1) * leaves // ranks)]
                first = [i * micro_batches // leaves for i in (own[0], own[-1] + 1)] if own else [0, 0]
                assert list(order.own) == list(range(*first))
                total, alive = TreeSum(order.sums), 0
                for micro_batch in order.own:
                    alive = max(alive, len(total.parts) + 1)
                    total.add(Node(micro_batch))
                # Left halves on the way down, and what comes; inside a leaf the sum of what has come.
                deepest = 1 + math.ceil(math.log2(max(len(own), 1))) + (micro_batches > leaves)
                assert alive <= deepest + max(len(total.parts) - 1, 0)
                assert len(total.parts) == order.roots[rank]
                roots += total.parts
                assert order.most == max(len(other.own) for other in orders)
                assert order.one_each == all(len(other.own) == 1 for other in orders)
            total = TreeSum(orders[0].root_sums)
            for root in roots:
                total.add(root)
            assert [part.name for part in total.parts] == [want]


def test_two_and_four_ranks_send_as_much_as_an_all_reduce():
    """One root a rank for 2 and 4 ranks, whatever V from their number on; three ranks have two or three."""
    for leaves in range(2, 41):
        assert Order.of(leaves, leaves, 0, 2).roots == (1, 1)
        assert leaves < 4 or Order.of(leaves, leaves, 0, 4).roots == (1, 1, 1, 1)
    assert Order.of(12, 12, 0, 3).roots == (2, 3, 2)


def test_misuse_is_named():
    with pytest.raises(ValueError, match="virtual_shards is 0, wanted 1 or more"):
        Tree(3, 0)
    with pytest.raises(ValueError, match="micro_batches is 0, wanted 1 or more"):
        Tree(0, 3)
    with pytest.raises(ValueError, match="length is 7, wanted a multiple of 2, the number of ranks"):
        sum_over_ranks([torch.zeros(7)], 7, Order.of(2, 2, 0, 2), World(0, 2))
