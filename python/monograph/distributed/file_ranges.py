"""One rank's bytes of a unit, read from the files its tensors are mapped from.

A tensor that safetensors has mapped is read by `pread` straight into the shard: none of its pages is touched,
and nothing but the share is read. What is not mapped, or may differ from its file, is copied from memory.
"""

from __future__ import annotations

import ctypes
import glob
import json
import os
from collections.abc import Mapping, Sequence

import torch

from monograph.distributed.layer_bytes import Layout
from monograph.memory.mapped_memory import Extent, MappedMemory, without_reading_ahead

_SAMPLE = 4096
_MOST = 1 << 30  # bytes of one call; Linux reads at most 2 GiB


def read_range(
    tensors: Mapping[str, torch.Tensor], layout: Layout, rank: int, reader: RangeReader | None = None
) -> torch.Tensor:
    """The shard of `rank`: uint8 [layout.bytes_per_rank], a new tensor on the device of the tensors.

    reader: one for all units of a model looks at memory once and opens each file once.
    """
    if reader is not None:
        return reader.read(tensors, layout, rank)
    with RangeReader() as own:
        return own.read(tensors, layout, rank)


class RangeReader:
    """Reads shards of units and counts where their bytes came from. For tensors that are there when it is
    made, until they are let go.

    with RangeReader() as reader:
        shard = reader.read(tensors, layout, rank)
    reader.from_files, reader.from_memory
    """

    def __init__(self) -> None:
        self.from_files = 0
        self.from_memory = 0
        self._memory = MappedMemory()

    def __enter__(self) -> RangeReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.close()

    def read(self, tensors: Mapping[str, torch.Tensor], layout: Layout, rank: int) -> torch.Tensor:
        """The shard of `rank`; zeros where no tensor lies."""
        device = next((tensors[piece.name].device for piece in layout.pieces), torch.device("cpu"))
        shard = torch.zeros(layout.bytes_per_rank, dtype=torch.uint8, device=device)
        if device.type == "meta":
            return shard
        for piece, begin, end, place in layout.parts(rank):
            into = shard[place : place + end - begin]
            self._read_bytes(piece.name, tensors[piece.name].detach(), begin, end, into)
        return shard

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor, or a contiguous view of one, in memory of its own."""
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if not tensor.is_meta and tensor.numel():
            self._read_bytes(name, tensor.detach(), 0, tensor.nbytes, made.view(-1).view(torch.uint8))
        return made

    def sample(self, tensors: Mapping[str, torch.Tensor]) -> bytes:
        """4 KiB from the middle of the largest tensor: what tells two models apart without reading them."""
        name, tensor = max(tensors.items(), key=lambda item: item[1].nbytes)
        if tensor.is_meta:
            return b""
        middle = tensor.nbytes // 2 // _SAMPLE * _SAMPLE
        into = torch.empty(min(_SAMPLE, tensor.nbytes - middle), dtype=torch.uint8)
        self._read_bytes(name, tensor.detach(), middle, middle + into.numel(), into)
        return bytes(into.tolist())

    def _read_bytes(self, name: str, tensor: torch.Tensor, first: int, last: int, into: torch.Tensor) -> None:
        extents = None
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            extents = self._memory.extents(tensor.data_ptr() + first, last - first)
        if extents is None:
            into.copy_(bytes_of(tensor, first, last))
            self.from_memory += last - first
            return
        _read_extents(name, extents, into)
        self.from_files += last - first


def bytes_of(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Bytes [first, last) of the tensor's elements in order: a view, or a copy of the rows around them."""
    size = tensor.element_size()
    if not tensor.is_contiguous():
        row = tensor[0].numel() * size
        top = first // row
        tensor = tensor[top : -(-last // row)].contiguous()
        first, last = first - top * row, last - top * row
    return tensor.reshape(-1).view(torch.uint8)[first:last]


def _read_extents(name: str, extents: Sequence[Extent], into: torch.Tensor) -> None:
    window = memoryview((ctypes.c_char * into.numel()).from_address(into.data_ptr())).cast("B")
    at = 0
    for extent in extents:
        done = 0
        while done < extent.nbytes:
            part = window[at : at + min(extent.nbytes - done, _MOST)]
            count = os.preadv(extent.file, [part], extent.offset + done)
            if count == 0:
                raise ValueError(
                    f"{name}: its file has {os.fstat(extent.file).st_size} bytes, wanted "
                    f"{extent.offset + extent.nbytes}: it was cut while it was mapped"
                )
            done += count
            at += count


_SMALL = 1 << 13  # bytes: descriptions and tables of 4-bit weights, which are looked at while loading


def read_small_tensors(folder: str | os.PathLike[str]) -> None:
    """Reads headers, small tensors and the first byte of every tensor of a folder's safetensors, and nothing
    around them, into the page cache.

    These are what loading a folder touches (seen with safetensors 0.8), and the first touch of a page that
    is mapped reads megabytes around it (`read_ahead_kb`): most of a base, for a rank that wants its part.
    """
    for path in sorted(glob.glob(os.path.join(glob.escape(os.fspath(folder)), "*.safetensors"))):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            without_reading_ahead(file)
            length = int.from_bytes(os.pread(file, 8, 0), "little")
            header = os.pread(file, min(length, _MOST), 8)
            if len(header) < length:
                continue  # whoever loads it says what is wrong
            for name, entry in json.loads(header).items():
                begin, end = (0, 0) if name == "__metadata__" else entry["data_offsets"]
                if begin < end:
                    os.pread(file, end - begin if end - begin <= _SMALL else 1, 8 + length + begin)
        finally:
            os.close(file)
