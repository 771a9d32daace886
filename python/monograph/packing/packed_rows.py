"""pack: lengths in, rows out; and the rows as something to look at."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from monograph.ops.pack import OVERLONG, STRATEGIES
from monograph.ops.pack import pack as pack_op

# What best fit has lists for; core/monograph/packing/packing.h.
LARGEST_CAPACITY = 1 << 24

Lengths: TypeAlias = "torch.Tensor | Sequence[int]"


class Piece(NamedTuple):
    """Tokens `start` to `start + length` of document number `document`."""

    document: int
    start: int
    length: int


def code_of(what: str, name: str, codes: Mapping[str, int]) -> int:
    """The number that stands for `name` in a schema."""
    if name not in codes:
        raise ValueError(f"{what} is {name!r}, wanted one of {', '.join(map(repr, codes))}")
    return codes[name]


def check_limits(capacity: int, max_documents: int | None) -> None:
    if not 1 <= capacity <= LARGEST_CAPACITY:
        raise ValueError(f"capacity is {capacity}, wanted 1 to {LARGEST_CAPACITY} tokens")
    if max_documents is not None and max_documents < 1:
        raise ValueError(f"max_documents is {max_documents}, wanted 1 or more, or None for any number")


def check_lengths(lengths: Lengths, capacity: int, overlong: str, first: int = 0) -> torch.Tensor:
    """The lengths as int64 on the CPU, after checks that name a document that is wrong.

    `first` is the number of the first document.
    """
    checked = torch.as_tensor(lengths).cpu()
    if checked.dim() != 1 or checked.is_floating_point() or checked.dtype == torch.bool:
        if checked.numel() == 0:
            return checked.reshape(-1).long()
        raise ValueError(
            f"lengths has dtype {checked.dtype} and shape {tuple(checked.shape)}, wanted one row of integers"
        )
    checked = checked.long().contiguous()
    if checked.numel() and int(checked.min()) < 0:
        document = int((checked < 0).nonzero()[0])
        raise ValueError(f"document {first + document} has length {int(checked[document])}, wanted 0 or more")
    if overlong == "refuse" and checked.numel() and int(checked.max()) > capacity:
        document = int((checked > capacity).nonzero()[0])
        raise ValueError(
            f"document {first + document} has length {int(checked[document])}, a row has {capacity} tokens; "
            'overlong="truncate" cuts such documents off, overlong="split" cuts them into pieces'
        )
    return checked


@dataclass(frozen=True)
class PackedRows:
    """Which documents share a row. `rows[i]` is a list of `Piece`; `for row in rows` walks them all."""

    lengths: torch.Tensor  # [all documents], int64
    capacity: int
    documents: torch.Tensor  # [pieces], int64
    starts: torch.Tensor  # [pieces], int64; empty unless documents were split
    row_offsets: torch.Tensor  # [rows + 1], int64: row i holds pieces row_offsets[i] to row_offsets[i + 1]

    def __len__(self) -> int:
        return self.row_offsets.numel() - 1

    def __getitem__(self, row: int) -> list[Piece]:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row %= len(self)
        part = slice(int(self.row_offsets[row]), int(self.row_offsets[row + 1]))
        documents = self.documents[part].tolist()
        starts = self.starts[part].tolist() or [0] * len(documents)
        return [
            Piece(*piece) for piece in zip(documents, starts, self.piece_lengths[part].tolist(), strict=True)
        ]

    def __iter__(self) -> Iterator[list[Piece]]:
        return (self[row] for row in range(len(self)))

    @functools.cached_property
    def piece_lengths(self) -> torch.Tensor:
        """Tokens of each piece, [pieces]."""
        left = self.lengths[self.documents]
        return (left - self.starts if self.starts.numel() else left).clamp(max=self.capacity)

    @property
    def tokens(self) -> int:
        """Tokens in all rows; less than those of the documents only if some were truncated."""
        return int(self.piece_lengths.sum())

    @property
    def efficiency(self) -> float:
        """The share of the rows' capacity that holds tokens."""
        return self.tokens / (len(self) * self.capacity) if len(self) else 1.0


def pack(
    lengths: Lengths,
    capacity: int,
    *,
    strategy: str = "best_fit_decreasing",
    overlong: str = "refuse",
    max_documents: int | None = None,
) -> PackedRows:
    """Distributes documents over as few rows of `capacity` tokens as the strategy finds.

        pack([5, 2, 3, 1], 6)[0]      # [Piece(document=0, start=0, length=5), Piece(3, 0, 1)]

    strategy: "best_fit_decreasing" wastes least (documents longest first, each into the fullest row that
        takes it); "first_fit" keeps to the order given (each into the first row that takes it).
    overlong: what becomes of a document longer than a row. "refuse" raises, "truncate" keeps its beginning,
        "split" packs pieces of it as documents of their own.
    max_documents: the most documents in a row; give the collator the same number.

    Empty documents are in no row. The result depends on nothing but the arguments.
    `monograph.packing.picture` draws it.
    """
    check_limits(capacity, max_documents)
    codes = code_of("strategy", strategy, STRATEGIES), code_of("overlong", overlong, OVERLONG)
    checked = check_lengths(lengths, capacity, overlong)
    return PackedRows(checked, capacity, *pack_op(checked, capacity, max_documents or 0, *codes))
