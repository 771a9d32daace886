"""The unit of offload is the storage: it moves once, whatever views of it are kept, and comes back once.

table = StorageTable(Disk(folder))
packed = [table.pack(t) for t in views]     # one write for each storage
table.unpack(packed[0])                     # one read; the storage lives until the last view was unpacked
"""

from __future__ import annotations

import itertools
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from monograph.memory.offload.places import Place
from monograph.upstream.torch_names import StorageWeakRef, neg_view, version_of


@dataclass(frozen=True)
class View:
    """A tensor without its storage."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugated: bool
    negated: bool

    @classmethod
    def of(cls, t: torch.Tensor) -> View:
        return cls(t.dtype, tuple(t.shape), t.stride(), int(t.storage_offset()), t.is_conj(), t.is_neg())

    def in_storage(self, storage: torch.UntypedStorage) -> torch.Tensor:
        made = torch.empty(0, dtype=self.dtype, device=storage.device)
        made.set_(storage, self.offset, self.shape, self.stride)
        made = made.conj() if self.conjugated else made
        return neg_view(made) if self.negated else made


def whole(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as uint8 [size]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Moved:
    """A storage that is elsewhere, for as long as a `Packed` knows it."""

    def __init__(self, token: Any, storage: torch.UntypedStorage, version: int) -> None:
        self.token, self.size, self.device = token, storage.nbytes(), storage.device
        self.source, self.version = StorageWeakRef(storage), version
        self.views: set[int] = set()  # of the Packed that are alive
        self.waiting: set[int] = set()  # those that were not unpacked since it was read
        self.storage: torch.UntypedStorage | None = None


class Packed:
    """What stands for a tensor that was packed."""

    __slots__ = ("__weakref__", "moved", "number", "view")

    def __init__(self, moved: Moved, view: View, number: int) -> None:
        self.moved, self.view, self.number = moved, view, number
        moved.views.add(number)
        moved.waiting.add(number)

    def __del__(self) -> None:
        # May run anywhere, inside a lock too: sets of numbers change in one step each.
        self.moved.views.discard(self.number)
        self.moved.waiting.discard(self.number)
        if not self.moved.waiting:
            self.moved.storage = None


class StorageTable:
    """Packs and unpacks tensors through one place. Thread safe."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._moved: weakref.WeakValueDictionary[int, Moved] = weakref.WeakValueDictionary()

    def pack(self, tensor: torch.Tensor) -> Packed:
        """Writes the storage unless it lies there as it is now. The tensor may be freed afterwards."""
        storage = tensor.untyped_storage()
        with self._lock:
            moved = self._known(storage, tensor)
            if moved is None:
                moved = Moved(self.place.write(whole(storage)), storage, version_of(tensor))
                self._moved[storage.data_ptr()] = moved
            return Packed(moved, View.of(tensor), next(self._numbers))

    def _known(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> Moved | None:
        moved = self._moved.get(storage.data_ptr())
        # An address is given to another storage when the first one is gone.
        if moved is None or moved.source.expired() or moved.size != storage.nbytes():
            return None
        if moved.version != version_of(tensor) or not self.place.same(moved.token, whole(storage)):
            return None  # written to since
        return moved

    def unpack(self, packed: Packed) -> torch.Tensor:
        moved = packed.moved
        with self._lock:
            storage = moved.storage
            if storage is None:
                storage = self.place.read(moved.token, moved.size, moved.device).untyped_storage()
                moved.waiting |= moved.views
            moved.waiting.discard(packed.number)
            moved.storage = storage if moved.waiting else None
            return packed.view.in_storage(storage)
