"""Spill files of this process: where bytes on disk lie."""

from __future__ import annotations

import logging
import os
import tempfile
import weakref
from dataclasses import dataclass

import torch

from monograph.ops import library  # noqa: F401  (registers the operators)

_log = logging.getLogger("monograph")
_IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class Counts:
    """What moved since a place was opened, and what is there now."""

    writes: int
    bytes_written: int
    reads: int
    bytes_read: int
    alive: int
    bytes_alive: int


def _file_system(folder: str) -> str:
    """The type of the file system that a folder lies on, as /proc/mounts calls it; "" if unknown."""
    found = ("", "")
    try:
        with open("/proc/mounts") as mounts:
            for line in mounts:
                _, where, kind, *_ = line.split()
                inside = folder == where or folder.startswith(where.rstrip("/") + "/")
                if inside and len(where) >= len(found[0]):
                    found = (where, kind)
    except OSError:
        return ""
    return found[1]


class Spill:
    """A spill file in a folder, the folder of temporary files unless given. It goes with this object, or with
    the process; what a killed process left in the folder is removed first.

    The file of an object that is gone lives on without a name until the last handle of it is gone.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = os.path.realpath(folder or tempfile.gettempdir())
        if not os.path.isdir(self.folder):
            raise ValueError(f"offload: folder is {self.folder}, wanted an existing folder")
        kind = _file_system(self.folder)
        if kind in _IN_MEMORY:
            _log.warning(
                "monograph: offload: %s is a %s, which is memory itself; wanted a folder on a disk",
                self.folder,
                kind,
            )
        name = torch.frombuffer(bytearray(os.fsencode(self.folder)), dtype=torch.uint8)
        self.file: int = torch.ops.monograph.spill_open(name)
        # Also when the process ends; a forked child does nothing.
        self._close = weakref.finalize(self, torch.ops.monograph.spill_close, self.file)

    def counts(self) -> Counts:
        return Counts(*torch.ops.monograph.spill_counts(self.file))

    def close(self) -> None:
        """Takes the file's name away; twice is once."""
        self._close()
