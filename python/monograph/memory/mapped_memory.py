"""Which bytes of which file lie at an address of this process: what safetensors mapped and nobody changed.

Linux alone tells it (/proc/self/maps, /proc/self/pagemap). Where nothing can be told for sure the answer is
None, and the bytes are to be copied from memory.
"""

from __future__ import annotations

import mmap
import os
import stat
from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

import torch

_MAPS = "/proc/self/maps"
_PAGEMAP = "/proc/self/pagemap"
# Bits of an entry of pagemap: in memory; swapped out; backed by a file or shared, so not a private copy.
_PRESENT, _SWAPPED, _FILE = 63, 62, 61


@dataclass(frozen=True)
class Area:
    """[begin, end) of the address space. identity: device and inode of its file, as the kernel shows them."""

    begin: int
    end: int
    offset: int  # in the file, of `begin`
    identity: tuple[str, str]
    path: str


class Extent(NamedTuple):
    """`nbytes` of an open file from `offset` on."""

    file: int
    offset: int
    nbytes: int


def mapped_areas() -> list[Area]:
    """The address space, in order; empty where the system does not tell."""
    try:
        with open(_MAPS, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().split("\n")
    except OSError:
        return []
    areas = []
    for line in lines:
        parts = line.split(None, 5)
        if len(parts) < 5:
            continue
        begin, end = (int(address, 16) for address in parts[0].split("-"))
        path = parts[5] if len(parts) == 6 else ""
        areas.append(Area(begin, end, int(parts[2], 16), (parts[3], parts[4]), path))
    return areas


def _is_of(file: int, area: Area) -> bool:
    """Whether an open file is the one behind an area, by device and inode as the kernel shows them."""
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        return False
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
    return area.identity == (device, str(found.st_ino)) or area.identity == _mapped_identity(file)


def _mapped_identity(file: int) -> tuple[str, str] | None:
    """Stacked file systems show another device, or inode, for what is mapped."""
    with mmap.mmap(file, 1, access=mmap.ACCESS_COPY) as probe:
        window = torch.frombuffer(probe, dtype=torch.uint8, count=1)
        address = window.data_ptr()
        del window
        found = [area.identity for area in mapped_areas() if area.begin <= address < area.end]
    return found[0] if found else None


class MappedMemory:
    """The files behind this process's memory as it is now, opened when first needed. True for tensors that
    are there now and as long as they are: later ones may have addresses of what was let go."""

    def __init__(self) -> None:
        self._areas = mapped_areas()
        self._begins = [area.begin for area in self._areas]
        self._files: dict[tuple[str, tuple[str, str]], int | None] = {}

    def close(self) -> None:
        for file in self._files.values():
            if file is not None:
                os.close(file)
        self._files.clear()

    def __enter__(self) -> MappedMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def extents(self, address: int, nbytes: int) -> list[Extent] | None:
        """Where the bytes lie in files; None if not all of them do, or if a page may differ from its file."""
        found: list[Extent] = []
        at, end = address, address + nbytes
        while at < end:
            place = bisect_right(self._begins, at) - 1
            if place < 0 or self._areas[place].end <= at:
                return None
            area = self._areas[place]
            file = self._open(area)
            if file is None:
                return None
            part = min(end, area.end) - at
            found.append(Extent(file, area.offset + at - area.begin, part))
            at += part
        return found if _unchanged(address, nbytes) else None

    def _open(self, area: Area) -> int | None:
        """The file of an area, if its path still leads to it: not deleted, not replaced, an ordinary file."""
        if not area.path.startswith("/"):
            return None
        key = (area.path, area.identity)
        if key not in self._files:
            self._files[key] = _open_the_same(area)
        return self._files[key]


def _open_the_same(area: Area) -> int | None:
    # maps writes a newline of a path as \012 and marks deleted files; neither is found under its name.
    try:
        file = os.open(area.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        same = _is_of(file, area)
    except (OSError, ValueError):  # an empty file cannot be mapped
        same = False
    if not same:
        os.close(file)
        return None
    without_reading_ahead(file)
    return file


def without_reading_ahead(file: int) -> None:
    """What is read is known to the byte; reading ahead would read the shares of other ranks."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)


def _unchanged(address: int, nbytes: int) -> bool:
    """Whether no page is a private copy: a write to a mapped tensor makes one and leaves the file alone."""
    page = mmap.PAGESIZE
    first, last = address // page, (address + nbytes - 1) // page
    try:
        with open(_PAGEMAP, "rb", buffering=0) as file:
            entries = os.pread(file.fileno(), 8 * (last - first + 1), 8 * first)
    except OSError:
        return False
    if len(entries) != 8 * (last - first + 1):
        return False
    found = torch.frombuffer(bytearray(entries), dtype=torch.int64)
    present, swapped, of_file = (found >> bit & 1 for bit in (_PRESENT, _SWAPPED, _FILE))
    return not bool(((present | swapped) & (1 - of_file)).any())
