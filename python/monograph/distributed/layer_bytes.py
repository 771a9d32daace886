"""Layout: where the frozen tensors of a unit (a decoder layer, the embedding, the head) lie in one row of
bytes that is sharded across ranks.

    layout = Layout.of(named_tensors, ranks=8)       # names, shapes and dtypes alone: meta tensors will do
    layout.bytes_per_rank, layout.padding
    layout.views(gathered)                           # {name: tensor} from uint8 [layout.nbytes]

Each tensor begins at a multiple of 16 bytes, in the order of the names given. Each rank has the same number
of bytes, a multiple of 16; what is behind the last tensor is zero. Nobody else knows an offset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

ALIGNMENT = 16  # bytes: the widest dtype, and what vector loads want


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Piece(NamedTuple):
    """A tensor in the row of bytes."""

    name: str
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def view(self, row: torch.Tensor) -> torch.Tensor:
        return row.narrow(0, self.offset, self.nbytes).view(self.dtype).view(self.shape)


class Part(NamedTuple):
    """Bytes [begin, end) of a piece's own bytes, which a rank holds from byte `place` of its shard on."""

    piece: Piece
    begin: int
    end: int
    place: int


@dataclass(frozen=True)
class Layout:
    """pieces: in the order of their offsets. ranks: across which the row is sharded."""

    pieces: tuple[Piece, ...]
    ranks: int

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], ranks: int) -> Layout:
        """The layout of these tensors; only their shapes and dtypes count."""
        if ranks < 1:
            raise ValueError(f"ranks is {ranks}, wanted 1 or more")
        pieces, offset = [], 0
        for name, tensor in tensors.items():
            nbytes = prod(tensor.shape) * tensor.dtype.itemsize
            pieces.append(Piece(name, offset, nbytes, tuple(tensor.shape), tensor.dtype))
            offset += aligned(nbytes)
        return cls(tuple(pieces), ranks)

    @property
    def tensor_bytes(self) -> int:
        """Of the tensors alone, as a replica holds them."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def _end(self) -> int:
        return self.pieces[-1].offset + self.pieces[-1].nbytes if self.pieces else 0

    @property
    def bytes_per_rank(self) -> int:
        return aligned(-(-self._end // self.ranks))

    @property
    def rows(self) -> int:
        """Rows of 16 bytes that hold all tensors, whatever the number of ranks."""
        return aligned(self._end) // ALIGNMENT

    def rows_of(self, rank: int) -> int:
        """How many of them a rank holds; behind them its shard is padding."""
        first, last = (min(byte // ALIGNMENT, self.rows) for byte in self.of_rank(rank))
        return last - first

    @property
    def nbytes(self) -> int:
        """Of the whole row: what a gather gives."""
        return self.bytes_per_rank * self.ranks

    @property
    def padding(self) -> int:
        """Bytes of the row that belong to no tensor."""
        return self.nbytes - self.tensor_bytes

    def of_rank(self, rank: int) -> tuple[int, int]:
        """The bytes [begin, end) of the row that a rank holds."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank is {rank}, wanted 0 to {self.ranks - 1}")
        return rank * self.bytes_per_rank, (rank + 1) * self.bytes_per_rank

    def parts(self, rank: int) -> list[Part]:
        """What a rank's shard holds, in the order of its bytes."""
        first, last = self.of_rank(rank)
        found = []
        for piece in self.pieces:
            begin = max(first - piece.offset, 0)
            end = min(last - piece.offset, piece.nbytes)
            if begin < end:
                found.append(Part(piece, begin, end, piece.offset + begin - first))
        return found

    def views(self, row: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors by name as views of the whole row, uint8 [nbytes]."""
        return {piece.name: piece.view(row) for piece in self.pieces}
