"""Owners sum the micro-batches of all ranks in the tree of one process, whatever the ranks are."""

from __future__ import annotations

import itertools

import pytest
import torch

from monograph.distributed.expert_group import ExpertGroup
from monograph.distributed.expert_sums import OwnerOrder, OwnerSum
from monograph.distributed.tree import Order, Tree, TreeSum

SIZES = (5, 3)  # of two leaves
NOTHING = float("nan")  # a rank without a micro-batch repeats one: that must not count


def pieces(micro_batch):
    """Numbers whose sum has other bits in every other order."""
    g = torch.Generator().manual_seed(micro_batch)
    return torch.randn(sum(SIZES), generator=g) * 10 ** (6 * torch.rand(sum(SIZES), generator=g))


def of_one(micro_batches, leaves):
    total = TreeSum(Order.of(micro_batches, leaves, 0, 1).sums)
    for index in range(micro_batches):
        total.add(pieces(index))
    return total.parts[0]


def of_owners(micro_batches, leaves, group):
    order = OwnerOrder.of(micro_batches, leaves, group)
    first, ranks = group.place * group.size, group.size * group.copies.size
    own = [list(Tree(micro_batches, leaves).own(first + r, ranks)) for r in range(group.size)]
    found = OwnerSum(order, group, len(SIZES))
    for turn in range(Order.of(micro_batches, leaves, 0, ranks).most):
        rows = torch.full((group.size, sum(SIZES)), NOTHING)
        for rank, batches in enumerate(own):
            if turn < len(batches):
                rows[rank] = pieces(batches[turn])
        found.add(rows.split(SIZES, 1))
    return found, order


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_sum_has_the_bits_of_one_process(ranks):
    others = 0
    for micro_batches, leaves in itertools.product(range(1, 10), (1, 2, 3, 5, 8, 9)):
        found, _ = of_owners(micro_batches, leaves, ExpertGroup(0, ranks))
        want = of_one(micro_batches, leaves)
        assert torch.equal(found.total(sum(SIZES)), want), (micro_batches, leaves)
        plain = torch.zeros(sum(SIZES))
        for index in reversed(range(micro_batches)):
            plain += pieces(index)
        others += not torch.equal(plain, want)
    assert others > 30  # another order shows


@pytest.mark.parametrize(("groups", "ranks"), [(2, 2), (2, 1), (3, 2), (4, 2)])
def test_the_roots_of_groups_are_those_of_so_many_ranks(groups, ranks):
    """Several groups own the same experts: each has what one rank of as many would have."""

    class Copies:
        size = groups

    for micro_batches, leaves in itertools.product(range(1, 10), (1, 3, 8)):
        whole = TreeSum(Order.of(micro_batches, leaves, 0, groups).root_sums)
        for place in range(groups):
            group = ExpertGroup(0, ranks, place=place)
            group.copies = Copies()  # type: ignore[assignment]
            found, order = of_owners(micro_batches, leaves, group)
            assert order.copies == Order.of(micro_batches, leaves, place, groups)
            roots = found.roots()
            assert len(roots) == order.copies.roots[place]
            for root in roots:
                whole.add(root)
        assert torch.equal(whole.parts[0], of_one(micro_batches, leaves)), (micro_batches, leaves)
