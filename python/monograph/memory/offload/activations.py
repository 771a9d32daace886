"""offload_activations: what autograd keeps for backward leaves memory until it is wanted.

    with mg.offload_activations(model, to="disk", folder="/scratch"):
        loss = model(**batch).loss
        loss.backward()                 # here or later, also behind the context

It works on whatever is saved in the forward passes inside: everything an eager model keeps, the inputs of
checkpointed layers, what a compiled graph hands to its backward. Values are those at the time of saving;
a tensor that stays in memory and is written to in between is an error in backward, as in torch.
"""

from __future__ import annotations

import os
from numbers import Integral
from types import TracebackType
from typing import Any

import torch
from torch import nn

from monograph.memory.offload.not_offloaded import Stayed, storages_of
from monograph.memory.offload.places import Copier, Disk, Host, Place
from monograph.memory.offload.spill import Counts
from monograph.memory.offload.storages import Packed, StorageTable
from monograph.ops.offload_marks import enter_context, has_storage, is_marked, leave_context
from monograph.upstream.torch_names import transforms_active

SMALLEST_BYTES = 1 << 20


def checked_min_bytes(min_bytes: int) -> int:
    if not isinstance(min_bytes, Integral) or isinstance(min_bytes, bool):
        raise TypeError(
            f"offload: min_bytes is {min_bytes!r} ({type(min_bytes).__name__}), wanted an int of bytes"
        )
    if min_bytes < 0:
        raise ValueError(f"offload: min_bytes is {min_bytes}, wanted 0 or more")
    return int(min_bytes)


def place_for(
    model: nn.Module | None, to: str, folder: str | os.PathLike[str] | None, copier: Copier | None
) -> Place:
    """The place that `to` names; refuses host memory for what is there already."""
    if to == "disk":
        if copier is not None:
            raise ValueError("offload: a copier moves to host memory, wanted to='host' beside it")
        return Disk(folder)
    if to != "host":
        raise ValueError(f"offload: to is {to!r}, wanted 'host' or 'disk'")
    if folder is not None:
        raise ValueError(f"offload: folder is {str(folder)!r} beside to='host', wanted to='disk'")
    if copier is not None:
        return Host(copier)
    devices = {p.device.type for p in model.parameters()} if model is not None else {"cpu"}
    if devices <= {"cpu", "meta"}:
        raise ValueError(
            "offload: to is 'host' and the model's tensors are on the host (cpu) already, wanted to='disk'"
        )
    from monograph.memory.offload.device_copies import DeviceCopies

    return Host(DeviceCopies())


class offload_activations:
    """See the module. Each storage moves once each way, however many views of it are saved.

    model: its parameters, buffers and other tensors stay where they are; None: every saved tensor may go.
    to: "disk", or "host" for tensors of another device. folder: on a disk; that for temporary files
    if missing.
    min_bytes: storages below this stay. Subclasses, sparse and quantised tensors stay too.
    attention: False keeps the outputs of our attention (`varlen_attention`) in memory.
    copier: moves in place of torch's device (tests). place: one that exists already.
    Of nested contexts the innermost one saves.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        to: str = "disk",
        *,
        folder: str | os.PathLike[str] | None = None,
        min_bytes: int = SMALLEST_BYTES,
        copier: Copier | None = None,
        place: Place | None = None,
        attention: bool = True,
    ) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(
                f"offload_activations: model is a {type(model).__name__}, wanted an nn.Module, or None: "
                "every saved tensor may go"
            )
        if model is None and to == "host" and copier is None and place is None:
            raise ValueError(
                "offload_activations: model is None beside to='host', wanted a model on another "
                "device, or to='disk'"
            )
        self.model, self.min_bytes = model, checked_min_bytes(min_bytes)
        self._attention = attention
        self._table = StorageTable(place or place_for(model, to, folder, copier))
        self._own: set[int] = set()
        self._hooks: list[Any] = []

    def counts(self) -> Counts:
        """Transfers and bytes so far."""
        return self._table.place.counts()

    def _goes(self, tensor: torch.Tensor) -> bool:
        if not has_storage(tensor) or isinstance(tensor, nn.Parameter) or transforms_active():
            return False
        storage = tensor.untyped_storage()
        return (
            storage.nbytes() >= max(self.min_bytes, 1)
            and storage.data_ptr() not in self._own
            and self._table.place.takes(tensor.device)
            and not is_marked(storage)
        )

    def _pack(self, tensor: torch.Tensor) -> Packed | Stayed:
        return self._table.pack(tensor) if self._goes(tensor) else Stayed(tensor)

    def _unpack(self, saved: Packed | Stayed) -> torch.Tensor:
        return self._table.unpack(saved) if isinstance(saved, Packed) else saved.unchanged()

    def __enter__(self) -> offload_activations:
        if self.model is not None:
            self._own = storages_of(self.model)
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._hooks.append(hooks)
        enter_context(self._attention)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        leave_context()
        self._hooks.pop().__exit__(kind, error, trace)
