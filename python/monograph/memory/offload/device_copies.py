"""Bytes of a device to pinned host memory and back, beside the computation; and the operators for devices.

A copy runs on a stream of its own. It begins when what was launched before it is done (an event), and the
source is kept until the copy is done: the allocator of a device gives memory away without asking other
streams. Memory to come back to is allocated on the stream that computes, whose pool it belongs to.
"""

from __future__ import annotations

import itertools
from collections import deque
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from monograph.ops import library  # noqa: F401  (registers the schemas)


class Device(Protocol):
    """What is needed of a device; torch.cuda and its like have it."""

    def current_stream(self) -> Any: ...

    def Stream(self) -> Any: ...

    def Event(self) -> Any: ...

    def stream(self, stream: Any) -> AbstractContextManager[Any]: ...


def pinned_like(bytes: torch.Tensor) -> torch.Tensor:
    return torch.empty(bytes.shape, dtype=bytes.dtype, pin_memory=True)


class Token:
    """A copy in host memory, and the event after which it is there."""

    def __init__(self, host: torch.Tensor, done: Any) -> None:
        self.host, self.done = host, done


class DeviceCopies:
    """A `Copier` with one stream for each direction.

    device: torch's module of the device, that of the first tensor if missing. most_pending: copies to the
    host whose sources are kept; one more makes the computation wait for the oldest.
    """

    def __init__(
        self, device: Device | None = None, *, most_pending: int = 2, pinned: Any = pinned_like
    ) -> None:
        self._device, self._most_pending, self._pinned = device, most_pending, pinned
        self._out: Any = None
        self._in: Any = None
        self._pending: deque[tuple[torch.Tensor, Any]] = deque()

    def _streams(self, tensor: torch.Tensor) -> Device:
        if self._device is None:
            self._device = torch.get_device_module(tensor.device)
        if self._out is None:
            self._out, self._in = self._device.Stream(), self._device.Stream()
        return self._device

    def to_host(self, bytes: torch.Tensor) -> Token:
        device = self._streams(bytes)
        ready = device.Event()
        ready.record(device.current_stream())
        host = self._pinned(bytes)
        with device.stream(self._out):
            self._out.wait_event(ready)
            host.copy_(bytes, non_blocking=True)
            done = device.Event()
            done.record(self._out)
        self._pending.append((bytes, done))
        self._release(device)
        return Token(host, done)

    def _release(self, device: Device) -> None:
        """Lets go of sources: of finished copies, and of the oldest if there are too many."""
        while self._pending and self._pending[0][1].query():
            self._pending.popleft()
        while len(self._pending) > self._most_pending:
            device.current_stream().wait_event(self._pending[0][1])
            self._pending.popleft()

    def wait_for_host(self) -> None:
        """What is launched from now on comes after every copy to the host."""
        if self._device is not None:
            for _, done in self._pending:
                self._device.current_stream().wait_event(done)
            self._pending.clear()

    def to_device(self, token: Token, device: torch.device) -> torch.Tensor:
        made, done = self.begin(token, device)
        self._streams(made).current_stream().wait_event(done)
        return made

    def begin(self, token: Token, device: torch.device) -> tuple[torch.Tensor, Any]:
        """The tensor that is being filled, and the event after which it is."""
        made = torch.empty(token.host.shape, dtype=token.host.dtype, device=device)
        own = self._streams(made)
        ready = own.Event()
        ready.record(own.current_stream())  # who had this memory before is done
        with own.stream(self._in):
            self._in.wait_event(ready)
            self._in.wait_event(token.done)
            made.copy_(token.host, non_blocking=True)
            done = own.Event()
            done.record(self._in)
        return made, done


# The operators on devices other than the CPU. A compiled graph gives the memory of x away as soon as offload
# returns, so that the stream of the computation waits for the copy there; coming back is begun by reload.
_NUMBERS = itertools.count(1)
_COPIES: dict[torch.device, DeviceCopies] = {}
_BEGUN: dict[int, tuple[torch.Tensor, Any, DeviceCopies]] = {}


def _copies(op: str, tensor: torch.Tensor | None) -> DeviceCopies:
    if tensor is None:
        raise ValueError(f"{op}: a tensor is None, wanted one with data")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type in ("cpu", "meta"):
        kind = f"{tensor.layout} on {tensor.device}".removeprefix("torch.")
        raise ValueError(f"{op}: a tensor is {kind}, wanted an ordinary tensor with data")
    device = tensor.device
    return _COPIES.setdefault(device, DeviceCopies())


def _offload(x: torch.Tensor, file: int, slot: int) -> torch.Tensor:
    copies = _copies("offload", x)
    token = copies.to_host(x)
    copies.wait_for_host()
    return token.host


def _reload(handle: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    copies, number = _copies("reload", after), next(_NUMBERS)
    device = copies._streams(after)
    written = device.Event()
    written.record(device.current_stream())  # offload made this stream wait for the copy
    made, done = copies.begin(Token(handle, written), after.device)
    _BEGUN[number] = (made, done, copies)
    return torch.tensor([number, made.numel() * made.element_size()])


def _wait(handle: torch.Tensor, after: torch.Tensor, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    _copies("wait", after)
    number = int(handle[0])
    if number not in _BEGUN:
        raise RuntimeError(f"wait: nothing was begun under number {number}, or it was waited for already")
    made, done, copies = _BEGUN.pop(number)
    copies._streams(made).current_stream().wait_event(done)
    if made.dtype != dtype or list(made.shape) != list(shape):
        raise RuntimeError(f"wait: {made.dtype} {list(made.shape)} came back, wanted {dtype} {list(shape)}")
    return made


for _name, _function in (("offload", _offload), ("reload", _reload), ("wait", _wait)):
    torch.library.impl(f"monograph::{_name}", "CompositeExplicitAutograd", _function)
