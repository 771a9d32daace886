"""pack_stream: documents of an endless iterator into rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

import torch

from monograph.ops.pack import OVERLONG
from monograph.ops.pack import pack_stream as pack_stream_op
from monograph.packing.packed_rows import Piece, check_lengths, check_limits, code_of

Document = TypeVar("Document")

# A call of the operator costs about 10 us, placing a document 0.1: so many share a call.
_READ_AHEAD = 256


def _pieces(number: int, length: int, capacity: int, overlong: str) -> list[Piece]:
    if overlong != "split":
        return [Piece(number, 0, min(length, capacity))] if length else []
    return [Piece(number, start, min(capacity, length - start)) for start in range(0, length, capacity)]


def pack_stream(
    documents: Iterable[Document],
    capacity: int,
    *,
    length_of: Callable[[Document], int] = lambda document: len(document["input_ids"]),  # type: ignore[index]
    overlong: str = "refuse",
    max_documents: int | None = None,
    max_open: int = 64,
    read_ahead: int = _READ_AHEAD,
) -> Iterator[list[tuple[Document, Piece]]]:
    """Rows of a stream whose end is not known: a generator of lists of (document, piece).

        for row in pack_stream(dataset, 4096, overlong="truncate"):
            features = [cut(document, piece) for document, piece in row]  # monograph.packing.cut

    At most `max_open` rows are open at once. A document goes into the open row with the least space that
    takes it; if none does, a row is opened, and the fullest is closed if there are too many. Rows come in
    the order of closing, the open ones last, oldest first. `Piece.document` counts the documents from 0.
    The rows depend on the documents and the options alone, not on `read_ahead`, the number of documents
    taken at a time.

    More open rows waste less and hold more documents back: of log-normal lengths of mean 350 in rows of 4096
    tokens, 16 open rows waste 0.14 % and 64 waste 0.11 % (`python -m monograph.bench packing`).
    """
    check_limits(capacity, max_documents)
    code_of("overlong", overlong, OVERLONG)
    if max_open < 1 or read_ahead < 1:
        raise ValueError(f"max_open is {max_open} and read_ahead {read_ahead}, wanted 1 or more")
    rows: dict[int, list[tuple[Document, Piece]]] = {}
    open_rows = torch.empty(0, 3, dtype=torch.int64)
    next_row, number = 0, 0
    source = iter(documents)
    while block := list(islice(source, read_ahead)):
        check_lengths([length_of(document) for document in block], capacity, overlong, first=number)
        pieces = [
            (document, piece)
            for offset, document in enumerate(block)
            for piece in _pieces(number + offset, length_of(document), capacity, overlong)
        ]
        number += len(block)
        lengths = torch.tensor([piece.length for _, piece in pieces], dtype=torch.int64)
        row_of, closed, open_rows = pack_stream_op(
            lengths, open_rows, next_row, capacity, max_documents or 0, max_open
        )
        for row, entry in zip(row_of.tolist(), pieces, strict=True):
            rows.setdefault(row, []).append(entry)
            next_row = max(next_row, row + 1)
        for row in closed.tolist():
            yield rows.pop(row)
    yield from rows.values()
