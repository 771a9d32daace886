"""The norm of a gradient whose factors of experts lie on their owners, with the bits of one process.

One process sums squares in float64 in the order of kernels/adamw/adamw.h, in which an owner has no block for
itself: columns of all experts alternate in a b. Here each rank sums its own in any order. Both sums are
within a known distance of the true one, some 1e-12 of it, and the norm is rounded to float32: where both ends
of that distance round to one number, it is the norm. Else, once in some 10^4 steps, the shares go to the
first rank of the group, one parameter after the other, and are summed there in the order of one process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from monograph.distributed.expert_adapter import FactorCut

BLOCK, LANES = 16384, 16  # of kernels/adamw/adamw.h
_ROW = 1024
_HALF_ULP = 2.0**-53
_AT_ONCE = 2**20  # numbers that are widened


@dataclass
class SquaresInOrder:
    """The kernel's sum: blocks of a tensor, each on 16 lanes that are folded in halves, then all blocks."""

    total: float = 0.0
    _waiting: list[torch.Tensor] = field(default_factory=list)

    def add(self, piece: torch.Tensor) -> None:
        """More of the tensor, any number of elements."""
        self._waiting.append(piece.reshape(-1))
        if sum(p.numel() for p in self._waiting) >= BLOCK:
            all_of_it = torch.cat(self._waiting)
            whole = all_of_it.numel() // BLOCK * BLOCK
            for part in all_of_it[:whole].split(64 * BLOCK):
                self._sum(part)
            self._waiting = [all_of_it[whole:]]

    def end(self) -> None:
        """The tensor ends: its last block is a shorter one."""
        rest = torch.cat(self._waiting) if self._waiting else torch.empty(0)
        self._waiting = []
        if rest.numel():
            self._sum(torch.nn.functional.pad(rest, (0, BLOCK - rest.numel())))

    def _sum(self, blocks: torch.Tensor) -> None:
        squares = blocks.double().square_().view(-1, BLOCK // LANES, LANES)
        lanes = torch.zeros(squares.shape[0], LANES, dtype=torch.float64)
        for row in squares.unbind(1):
            lanes += row
        half = LANES // 2
        while half:
            lanes = lanes[:, :half] + lanes[:, half : 2 * half]
            half //= 2
        for block in lanes[:, 0].tolist():
            self.total += block


def squares(pieces: Sequence[torch.Tensor]) -> tuple[float, int]:
    """A sum in float64 in some order, and how many additions an element goes through at most."""
    found = [_by_rows(piece.double().square_()) for t in pieces for piece in t.split(_AT_ONCE)]
    rows, depth = torch.cat([torch.zeros(1, dtype=torch.float64), *found]), _ROW
    while rows.numel() > 1:
        rows, depth = _by_rows(rows), depth + _ROW
    return float(rows), depth


def _by_rows(t: torch.Tensor) -> torch.Tensor:
    whole = t.numel() // _ROW * _ROW
    sums = t[:whole].view(-1, _ROW).sum(1)
    return sums if whole == t.numel() else torch.cat([sums, t[whole:].sum()[None]])


def _rounded(total: float) -> torch.Tensor:
    """As the kernel rounds: the root in float64, then float32."""
    return torch.tensor(math.sqrt(total), dtype=torch.float64).float()


@dataclass(eq=False)
class SpreadNorm:
    """Of a flat gradient. sizes, cuts: of each parameter of it, None for one that every rank has; shapes:
    of this rank's. certain: how much wider the distance is taken; for tests."""

    sizes: Sequence[int]
    shapes: Sequence[torch.Size]
    cuts: Sequence[FactorCut | None]
    wider: float = 1.0
    in_order: int = 0  # how often that was needed

    def __post_init__(self) -> None:
        self.group = next(cut.group for cut in self.cuts if cut is not None)
        whole = [s if c is None else c.whole_shape(s) for s, c in zip(self.shapes, self.cuts, strict=True)]
        self._blocks = sum(shape.numel() for shape in whole) // BLOCK + 2 * len(whole)

    def __call__(self, gradient: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
        """float32 []. ends: where in the gradient the kernel's tensors end. A collective."""
        pieces = gradient.detach().split(list(self.sizes))
        both = list(zip(pieces, self.cuts, strict=True))
        shared, depth = squares([piece for piece, cut in both if cut is None])
        own, deep = squares([piece for piece, cut in both if cut is not None])
        table = self.group.gathered(torch.tensor([own, float(deep)], dtype=torch.float64))
        total = shared
        for one in table[:, 0].tolist():
            total += one
        if not math.isfinite(total) or total == 0:
            return torch.tensor(total).sqrt() if total == 0 else torch.tensor(total)
        depth = max(depth, int(table[:, 1].max())) + self.group.size + 2
        # The kernel's: 1024 sums in a lane, four folds, then the blocks.
        distance = (depth + BLOCK // LANES + 4 + self._blocks + 8) * _HALF_ULP * 1.01 * self.wider
        low, high = (_rounded(total * (1 + sign * distance)) for sign in (-1, 1))
        return low if bool(low == high) else self._in_order(pieces, ends)

    def _in_order(self, pieces: Sequence[torch.Tensor], ends: Sequence[int]) -> torch.Tensor:
        self.in_order += 1
        found, at, wanted = SquaresInOrder(), 0, set(ends)
        for piece, cut, shape in zip(pieces, self.cuts, self.shapes, strict=True):
            whole = piece if cut is None else cut.gathered(piece.view(shape))
            if whole is not None and self.group.rank == 0:
                found.add(whole)
            at += piece.numel()
            if at in wanted:
                found.end()
        norm = torch.tensor([math.sqrt(found.total)], dtype=torch.float64).float()
        if self.group.size > 1:
            dist.broadcast(norm, group=self.group.group, group_src=0)
        return norm[0]
