"""Packing: several documents in one row, so that no token of a batch is padding.

    from monograph.packing import PackedCollator, PackedDataset, PackedSampler

    sampler = PackedSampler(lengths, capacity=4096, rows_per_step=8, max_documents=64, overlong="truncate")
    collate = PackedCollator(pad_to_multiple_of=4096, max_documents=64)
    for batch in DataLoader(PackedDataset(dataset), batch_sampler=sampler, collate_fn=collate):
        loss = model(**batch).loss

`python -m monograph.packing FILE` draws how the documents of a file pack.
"""

from monograph.packing.collator import PackedCollator, PaddedCollator, total_target_tokens
from monograph.packing.packed_rows import PackedRows, Piece, pack
from monograph.packing.picture import Efficiency, draw_rows, measure_efficiency, text_picture
from monograph.packing.sampler import PackedDataset, PackedSampler, cut
from monograph.packing.stream import pack_stream

__all__ = [
    "Efficiency",
    "PackedCollator",
    "PackedDataset",
    "PackedRows",
    "PackedSampler",
    "PaddedCollator",
    "Piece",
    "cut",
    "draw_rows",
    "measure_efficiency",
    "pack",
    "pack_stream",
    "text_picture",
    "total_target_tokens",
]
