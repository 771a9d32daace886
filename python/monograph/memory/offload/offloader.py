"""StorageOffloader: tensors that a program keeps leave memory as whole storages and come back as they were.

offloader = StorageOffloader("disk", folder="/scratch")
moved = offloader.offload(layer)       # every reference in `layer` is a meta tensor now
moved.reload()                         # shapes, strides, offsets, dtypes and bits as before
"""

from __future__ import annotations

import gc
import os
from typing import Any

import torch

from monograph.memory.offload.activations import checked_min_bytes, place_for
from monograph.memory.offload.places import Copier, Place
from monograph.memory.offload.references import Reference, references_in
from monograph.memory.offload.spill import Counts
from monograph.memory.offload.storages import View, whole
from monograph.ops.offload_marks import has_storage, is_marked
from monograph.upstream.torch_names import StorageWeakRef


class LeakedView(RuntimeError):
    """A storage was moved, and somebody else still has a view of it, so that its memory is not free."""


def _placeholder(view: View) -> torch.Tensor:
    """Shape, strides and dtype without data: whoever computes with it gets an error or a meta tensor."""
    return torch.empty_strided(view.shape, view.stride, dtype=view.dtype, device="meta")


def _holders(address: int) -> list[str]:
    """The tensors that Python still has of a storage, and under which names."""
    seen = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
    found = []
    for tensor in seen:
        if not has_storage(tensor) or tensor.untyped_storage().data_ptr() != address:
            continue
        what = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        for holder in gc.get_referrers(tensor):
            if holder is seen or not isinstance(holder, (dict, list, tuple)) or len(holder) > 10_000:
                continue
            keys = [k for k, held in holder.items() if held is tensor] if isinstance(holder, dict) else []
            found.append(
                f"{what} held as {keys[0]!r} of a dict" if keys else f"{what} in a {type(holder).__name__}"
            )
    return found


class _Storage:
    """One storage: its references, and where it is."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.size, self.device, self.address = storage.nbytes(), storage.device, storage.data_ptr()
        self.weak = StorageWeakRef(storage)
        self.storage: torch.UntypedStorage | None = storage  # until it is written
        self.references: list[tuple[Reference, View]] = []
        self.token: Any = None


class Offloaded:
    """What one call of `offload` moved."""

    def __init__(self, place: Place, storages: list[_Storage]) -> None:
        self._place, self._storages = place, storages

    @property
    def nbytes(self) -> int:
        return sum(storage.size for storage in self._storages)

    def reload(self) -> None:
        """Brings every storage back, once, and puts the views where they were."""
        for one in self._storages:
            storage = self._place.read(one.token, one.size, one.device).untyped_storage()
            for reference, view in one.references:
                reference.set(view.in_storage(storage))
            one.token = None
        self._storages = []


class StorageOffloader:
    """Moves storages to a place, see `offload_activations` for `to`, `folder` and `copier`."""

    def __init__(
        self,
        to: str = "disk",
        *,
        folder: str | os.PathLike[str] | None = None,
        min_bytes: int = 0,
        copier: Copier | None = None,
    ) -> None:
        self._place = place_for(None, to, folder, copier)
        self.min_bytes = checked_min_bytes(min_bytes)

    def counts(self) -> Counts:
        return self._place.counts()

    def offload(self, owner: Any, name: str = "") -> Offloaded:
        """Moves the storages of all tensors in `owner`; see `references_in` for what that may be.

        Each moves once, whole, whatever views there are. Raises LeakedView, with names, if somebody else has
        a view of one: then all values are back in their places, in storages of their own.
        """
        moved = self._storages_in(owner, name)
        for one in moved:
            assert one.storage is not None
            one.token = self._place.write(whole(one.storage))
            one.storage = None
        for one in moved:
            for place, view in one.references:
                place.set(_placeholder(view))
        self._refuse_leaks(moved)
        return Offloaded(self._place, moved)

    def _storages_in(self, owner: Any, name: str) -> list[_Storage]:
        found: dict[int, _Storage] = {}
        for reference in references_in(owner, name):
            tensor = reference.tensor
            if not has_storage(tensor) or isinstance(tensor, torch.nn.Parameter):
                continue
            storage = tensor.untyped_storage()
            if storage.nbytes() < max(self.min_bytes, 1) or is_marked(storage):
                continue
            if not self._place.takes(tensor.device):
                raise ValueError(
                    f"offload: {reference.name} is on {tensor.device} already, wanted another device"
                )
            known = found.setdefault(storage.data_ptr(), _Storage(storage))
            known.references.append((_without(reference), View.of(tensor)))
        return list(found.values())

    def _refuse_leaks(self, moved: list[_Storage]) -> None:
        left = [one for one in moved if not one.weak.expired()]
        if left:
            gc.collect()  # tensors in circles of references
            left = [one for one in left if not one.weak.expired()]
        if not left:
            return
        texts = []
        for one in left:
            names = ", ".join(place.name for place, _ in one.references)
            holders = _holders(one.address) or ["held by a local variable, by autograd or by C++"]
            texts.append(f"{one.size} bytes of {names}: {'; '.join(holders)}")
        Offloaded(self._place, moved).reload()
        raise LeakedView(
            "offload: a view outside of what is offloaded keeps the memory of " + " | ".join(texts)
        )


def _without(reference: Reference) -> Reference:
    """The place alone: a tensor kept here would be the leak."""
    return Reference(reference.name, torch.empty(0), reference.set)
