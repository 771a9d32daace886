"""Eager backward without gathered bytes kept since forward.

What autograd saves of them is a note of where they lie, and the first who reads a note in backward gathers
the unit again. Graphs need none of it: there the gather is a node that a partitioner repeats.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from monograph.upstream.torch_names import top_saved_tensors_hooks


class _Gathered:
    """The bytes of one forward, there again while its backward lasts: as long as a note is left to read."""

    def __init__(self, gather: Callable[[], torch.Tensor]) -> None:
        self.gather = gather
        self.row: torch.Tensor | None = None
        self.notes = self.read = 0

    def view(self, note: _Note) -> torch.Tensor:
        if self.row is None:
            with torch.no_grad():
                self.row = self.gather()
        found = self.row.view(note.dtype).as_strided(note.shape, note.stride, note.offset)
        self.read += 1
        if self.read >= self.notes:  # a second backward over a kept graph gathers for itself
            self.row, self.read = None, 0
        return found


class _Note:
    """Stands for a view of the gathered bytes."""

    def __init__(self, of: _Gathered, view: torch.Tensor) -> None:
        self.of = of
        self.dtype, self.shape = view.dtype, view.shape
        self.stride, self.offset = view.stride(), view.storage_offset()
        of.notes += 1


def _unpacked(saved: torch.Tensor | _Note) -> torch.Tensor:
    return saved if isinstance(saved, torch.Tensor) else saved.of.view(saved)


def kept_as_notes(row: torch.Tensor, gather: Callable[[], torch.Tensor]) -> AbstractContextManager[Any]:
    """Inside, views of `row` are saved for backward as notes. Somebody else's hooks (those of a checkpoint,
    which saves nothing and repeats the forward) stay."""
    if not torch.is_grad_enabled() or top_saved_tensors_hooks(False) is not None:
        return nullcontext()
    gathered, storage = _Gathered(gather), row.untyped_storage().data_ptr()

    def pack(tensor: torch.Tensor) -> torch.Tensor | _Note:
        if tensor.numel() and tensor.untyped_storage().data_ptr() == storage:
            return _Note(gathered, tensor)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, _unpacked)
