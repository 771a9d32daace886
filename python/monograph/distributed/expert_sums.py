"""Sums of the gradients of cut factors over a step's micro-batches: at the owners, in the tree's order.

An owner has its experts' gradients of every micro-batch of its group apart, one row for each rank. It sums
each rank's as that rank sums the rest of the adapter, and then the ranks' roots: nothing is sent, but where
other groups own the same experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from monograph.distributed.expert_group import ExpertGroup
from monograph.distributed.tree import Order, Tree, TreeSum, padded, sum_over_ranks


@dataclass(frozen=True)
class OwnerOrder:
    """Plain numbers: a graph holds them as constants. counts, sums: of each rank of the group its
    micro-batches, and how often is summed after each; roots: how often after each root of all of them;
    copies: the order among the groups."""

    counts: tuple[int, ...]
    sums: tuple[tuple[int, ...], ...]
    roots: tuple[int, ...]
    copies: Order

    @staticmethod
    def of(micro_batches: int, leaves: int, group: ExpertGroup) -> OwnerOrder:
        tree, groups = Tree(micro_batches, leaves), group.copies.size
        first, ranks = group.place * group.size, groups * group.size
        orders = [Order.of(micro_batches, leaves, first + r, ranks) for r in range(group.size)]
        roots = [root for order in orders for root in tree.roots(order.own)]
        return OwnerOrder(
            counts=tuple(len(order.own) for order in orders),
            sums=tuple(order.sums for order in orders),
            roots=tuple(tree.sums(roots)),
            copies=Order.of(micro_batches, leaves, group.place, groups),
        )


class OwnerSum:
    """Sums gradients by leaf as they come, each [ranks, n], one list for each round of micro-batches. It owns
    them and writes to them."""

    def __init__(self, order: OwnerOrder, group: ExpertGroup, leaves: int) -> None:
        self._order, self._group = order, group
        self._trees = [[TreeSum(sums) for sums in order.sums] for _ in range(leaves)]
        self._rounds = 0

    def add(self, pieces: Sequence[torch.Tensor]) -> None:
        """Those of ranks that have no micro-batch any more are of one that they repeat: left out."""
        for trees, rows in zip(self._trees, pieces, strict=True):
            for count, tree, row in zip(self._order.counts, trees, rows.unbind(0), strict=True):
                if self._rounds < count:
                    tree.add(row)
        self._rounds += 1

    def roots(self) -> list[torch.Tensor]:
        """Of this group's subtrees, the leaves behind each other."""
        found: list[list[torch.Tensor]] = []
        for trees in self._trees:
            total = TreeSum(self._order.roots)
            for tree in trees:
                for part in tree.parts:
                    total.add(part)
            found.append(total.parts)
        return [torch.cat(parts) for parts in zip(*found, strict=True)]

    def total(self, length: int) -> torch.Tensor:
        """[length], of all groups."""
        copies, roots = self._group.copies, self.roots()
        if copies.size == 1:
            return roots[0]
        wanted = padded(length, copies.size)
        roots = [nn.functional.pad(part, (0, wanted - length)) for part in roots]
        return sum_over_ranks(roots, wanted, self._order.copies, copies, torch.device("cpu"))[:length]
