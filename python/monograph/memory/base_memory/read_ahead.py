"""The thread that reads a model's base ahead, as long as the model lives."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch

from monograph.memory.base_memory.mapped_base import mapped_tensors
from monograph.memory.base_memory.sizes import bytes_of
from monograph.memory.mapped_memory import MappedMemory

EVENTS = ("use", "wait", "read", "drop")
_OPEN = "read_ahead_open: "


@dataclass(frozen=True)
class Numbers:
    """Bytes, and seconds that operators waited. held: what it believes to be in memory."""

    allowed: int
    held: int
    most_held: int
    read: int
    dropped: int
    waited: float


@dataclass(frozen=True)
class Event:
    """What happened from `begin` to `end`, in seconds since the first use."""

    kind: str
    unit: int
    begin: float
    end: float
    nbytes: int


class BaseMemory:
    """How much of a model's mapped base is in memory, and what was done for it."""

    def __init__(self, number: int, nbytes: int, units: int, mapped: list[tuple[Any, int]]) -> None:
        self._number = number
        self._mapped = mapped  # storages and where they lie, as long as the model lives
        self.nbytes = nbytes  # of the base that is read ahead: without the table of tokens
        self.units = units

    @property
    def numbers(self) -> Numbers:
        found = torch.ops.monograph.read_ahead_numbers(self._number)
        allowed, held, most_held, read, dropped, waited = found
        return Numbers(allowed, held, most_held, read, dropped, waited / 1e9)

    def events(self) -> list[Event]:
        """The first 65,536 of them."""
        flat = torch.ops.monograph.read_ahead_events(self._number)
        rows = (flat[i : i + 5] for i in range(0, len(flat), 5))
        return [Event(EVENTS[row[0]], row[1], row[2] / 1e9, row[3] / 1e9, row[4]) for row in rows]

    def check(self) -> None:
        """Raises, and reads nothing more ahead, if the base lies elsewhere now: its mapping is gone then, and
        its addresses may be somebody else's."""
        moved = [address for storage, address in self._mapped if storage.data_ptr() != address]
        if moved:
            self.close()
            raise RuntimeError(
                f"base_memory: {len(moved)} of {len(self._mapped)} tensors of the base were moved from the "
                "files into memory (share_memory() does that); wanted a model that stays mapped: load it anew"
            )

    def close(self) -> None:
        """Ends the thread. The base stays mapped, and is read as it is touched."""
        torch.ops.monograph.read_ahead_close(self._number)


_of_model: weakref.WeakKeyDictionary[torch.nn.Module, BaseMemory] = weakref.WeakKeyDictionary()


def _close(number: int, *kept: list[Any]) -> None:
    """`kept`: the mappings, which must outlive the thread."""
    torch.ops.monograph.read_ahead_close(number)
    for mappings in kept:
        mappings.clear()


def _mapped(storages: list[Any], addresses: list[int]) -> list[tuple[Any, int]]:
    """Those that hold one of the addresses, which are sorted, and where they begin."""
    found = []
    for storage in storages:
        begin = storage.data_ptr()
        place = bisect_left(addresses, begin)
        if place < len(addresses) and addresses[place] < begin + storage.nbytes():
            found.append((storage, begin))
    return found


def limit_base_memory(model: torch.nn.Module, amount: int | str) -> BaseMemory:
    """Holds no more than `amount` of the model's mapped base in memory, from now on: what is used next is
    read by a thread while the model computes, what is used last is let go. Operators that read a weight
    which is not there yet wait for it. Bits do not change.

    ValueError if a large tensor is not mapped from a file, or if the largest layer does not fit. Ends with
    the model. In a forked child nothing is read ahead.
    """
    allowed = bytes_of(amount)
    if model in _of_model:
        raise ValueError("base_memory: this model has a limit already, wanted one")
    with MappedMemory() as memory:
        tensors = mapped_tensors(model, memory)
        if not tensors:
            raise ValueError(
                "base_memory: nothing of the model is mapped from a file, wanted a folder that was quantised "
                "before; and Linux, which tells what is mapped"
            )
        files = sorted({tensor.file for tensor in tensors})
        flat: list[int] = []
        for t in tensors:
            flat += (t.address, t.nbytes, t.unit, files.index(t.file), t.offset, int(t.reading))
        try:
            number = torch.ops.monograph.read_ahead_open(flat, files, allowed)
        except RuntimeError as error:
            line = str(error).split("\n")[0]
            reason = line[line.find(_OPEN) + len(_OPEN) :] if _OPEN in line else line
            raise ValueError(
                reason if reason.startswith("base_memory") else f"base_memory: {reason}"
            ) from None
    storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
    places = _mapped(storages, sorted(t.address for t in tensors))
    weakref.finalize(model, _close, number, storages, places)
    held = sum(t.nbytes for t in tensors if t.reading.name != "SCATTERED")
    _of_model[model] = BaseMemory(number, held, 1 + max(t.unit for t in tensors), places)
    return _of_model[model]


def base_memory_of(model: torch.nn.Module) -> BaseMemory | None:
    """That of a model, or of the one that PEFT or a compiler wrapped."""
    return next((_of_model[part] for part in model.modules() if part in _of_model), None)
