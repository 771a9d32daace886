"""monograph::pack and pack_stream."""

from __future__ import annotations

import torch

from monograph.ops import library  # noqa: F401  (the schema is registered there)
from monograph.ops.argument_checks import check_tensors

# The numbers of core/monograph/packing/packing.h.
STRATEGIES = {"best_fit_decreasing": 0, "first_fit": 1}
OVERLONG = {"truncate": 0, "split": 1, "refuse": 2}


def pack(
    lengths: torch.Tensor, capacity: int, max_documents: int, strategy: int, overlong: int
) -> list[torch.Tensor]:
    """[documents, starts, row_offsets], all int64. Most people call `monograph.packing.pack` instead.

    Row i holds pieces `row_offsets[i]` to `row_offsets[i + 1]`; piece p is the part of document
    `documents[p]` that begins at its token `starts[p]`. `starts` is empty unless documents were split.
    `max_documents` of 0 means any number.
    """
    return torch.ops.monograph.pack(lengths.contiguous().long(), capacity, max_documents, strategy, overlong)


def pack_stream(
    lengths: torch.Tensor, open: torch.Tensor, next_row: int, capacity: int, max_documents: int, max_open: int
) -> list[torch.Tensor]:
    """[row of each document, rows that were closed in that order, rows still open], all int64.

    `open` has one row (number, space, documents) for each row still open, oldest first; `next_row` is the
    number the next row gets. Most people call `monograph.packing.pack_stream` instead.
    """
    return torch.ops.monograph.pack_stream(
        lengths.contiguous().long(), open.contiguous(), next_row, capacity, max_documents, max_open
    )


def portable_pack(
    lengths: torch.Tensor, capacity: int, max_documents: int, strategy: int, overlong: int
) -> list[torch.Tensor]:
    """For lengths on another device: packing is a serial search, so it runs on the CPU."""
    check_tensors("pack", lengths=lengths)
    packed = torch.ops.monograph.pack(lengths.cpu().contiguous(), capacity, max_documents, strategy, overlong)
    return [part.to(lengths.device) for part in packed]


def portable_pack_stream(
    lengths: torch.Tensor, open: torch.Tensor, next_row: int, capacity: int, max_documents: int, max_open: int
) -> list[torch.Tensor]:
    """As `portable_pack`."""
    check_tensors("pack_stream", lengths=lengths, open=open)
    packed = torch.ops.monograph.pack_stream(
        lengths.cpu().contiguous(), open.cpu().contiguous(), next_row, capacity, max_documents, max_open
    )
    return [part.to(lengths.device) for part in packed]


@torch.library.register_fake("monograph::pack")
def _(lengths, capacity, max_documents, strategy, overlong):  # type: ignore[no-untyped-def]
    context = torch.library.get_ctx()
    pieces, offsets = context.new_dynamic_size(), context.new_dynamic_size(min=1)
    starts = pieces if overlong == OVERLONG["split"] else 0
    return [lengths.new_empty([size]) for size in (pieces, starts, offsets)]


@torch.library.register_fake("monograph::pack_stream")
def _(lengths, open, next_row, capacity, max_documents, max_open):  # type: ignore[no-untyped-def]
    check_tensors("pack_stream", lengths=lengths, open=open)
    context = torch.library.get_ctx()
    closed, still_open = context.new_dynamic_size(), context.new_dynamic_size()
    return [
        lengths.new_empty([lengths.numel()]),
        lengths.new_empty([closed]),
        lengths.new_empty([still_open, 3]),
    ]


torch.library.impl("monograph::pack", "CompositeExplicitAutograd")(portable_pack)
torch.library.impl("monograph::pack_stream", "CompositeExplicitAutograd")(portable_pack_stream)
