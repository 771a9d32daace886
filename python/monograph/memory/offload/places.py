"""Where storages go: a spill file, or host memory. A place moves bytes and knows nothing of views."""

from __future__ import annotations

import os
from typing import Any, Protocol

import torch

from monograph.memory.offload.spill import Counts, Spill


class Place(Protocol):
    """`bytes` is a whole storage as uint8 [size]. A token keeps what it stands for; nobody else does."""

    def write(self, bytes: torch.Tensor) -> Any: ...

    def read(self, token: Any, size: int, device: torch.device) -> torch.Tensor:
        """A new tensor, uint8 [size], that nobody else holds."""
        ...

    def same(self, token: Any, bytes: torch.Tensor) -> bool:
        """Whether the token stands for these bytes."""
        ...

    def takes(self, device: torch.device) -> bool: ...

    def counts(self) -> Counts: ...


class Disk:
    """A spill file of its own."""

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.spill = Spill(folder)

    def write(self, bytes: torch.Tensor) -> torch.Tensor:
        handle: torch.Tensor = torch.ops.monograph.offload(bytes.cpu(), self.spill.file, 0)
        return handle

    def read(self, token: torch.Tensor, size: int, device: torch.device) -> torch.Tensor:
        found: torch.Tensor = torch.ops.monograph.wait(token, token, [size], torch.uint8)
        return found.to(device)

    def same(self, token: torch.Tensor, bytes: torch.Tensor) -> bool:
        return bool(torch.ops.monograph.spill_same(token, bytes.cpu()))

    def takes(self, device: torch.device) -> bool:
        return device.type != "meta"

    def counts(self) -> Counts:
        return self.spill.counts()


class Copier(Protocol):
    """How bytes leave a device and come back; `device_copies.DeviceCopies` is the one of real devices."""

    def to_host(self, bytes: torch.Tensor) -> Any: ...

    def to_device(self, token: Any, device: torch.device) -> torch.Tensor: ...


class Host:
    """Host memory, for tensors of another device."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._counts = [0, 0, 0, 0]

    def write(self, bytes: torch.Tensor) -> Any:
        token = self._copier.to_host(bytes)
        self._counts[0] += 1
        self._counts[1] += bytes.numel()
        return token

    def read(self, token: Any, size: int, device: torch.device) -> torch.Tensor:
        found = self._copier.to_device(token, device)
        self._counts[2] += 1
        self._counts[3] += size
        return found

    def same(self, token: Any, bytes: torch.Tensor) -> bool:
        return True  # the version that StorageTable compares; to read the bytes would wait for the device

    def takes(self, device: torch.device) -> bool:
        return device.type not in ("cpu", "meta")

    def counts(self) -> Counts:
        writes, bytes_written, reads, bytes_read = self._counts
        return Counts(writes, bytes_written, reads, bytes_read, 0, 0)
