"""Storages that offload leaves where they are. They are marked here: our attention marks its output."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from monograph.upstream.torch_names import StorageWeakRef

_LOCK = threading.Lock()
_MARKED: dict[int, StorageWeakRef] = {}


def mark_not_offload(*tensors: torch.Tensor) -> None:
    """Keeps the storages of these tensors, and so all views of them, out of every offload from now on.

        up = layer.up_proj(x)
        mg.mark_not_offload(up)             # its backward comes first, or it is cheap to keep
        y = layer.down_proj(up)             # would have saved it to the file

    What autograd has saved before the mark has gone. An operation that saves its own result, as torch's
    scaled_dot_product_attention, softmax, exp, tanh and sigmoid do, has done so before its caller sees it; a
    copy, as the `reshape` behind a transposed result, has a storage of its own. For our attention
    `offload_activations(attention=False)` sets the mark in time. A compiled graph sets none: there the
    partitioner chooses, by size.
    """
    for place, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"mark_not_offload: argument {place} is a {type(tensor).__name__}, wanted a tensor: "
                "mark_not_offload(x, y), or mark_not_offload(*tensors) for a list"
            )
    with _LOCK:
        for address in [a for a, ref in _MARKED.items() if ref.expired()]:
            del _MARKED[address]
        for tensor in tensors:
            storage = tensor.untyped_storage()
            _MARKED[storage.data_ptr()] = StorageWeakRef(storage)


class _Contexts(threading.local):
    """Of the contexts of a thread: whether the output of our attention may go."""

    def __init__(self) -> None:
        self.attention: list[bool] = []


_CONTEXTS = _Contexts()


def enter_context(attention: bool) -> None:
    _CONTEXTS.attention.append(attention)


def leave_context() -> None:
    _CONTEXTS.attention.pop()


def mark_attention(output: torch.Tensor) -> None:
    """Called by our attention before autograd saves its output."""
    if _CONTEXTS.attention and not _CONTEXTS.attention[-1] and has_storage(output):
        mark_not_offload(output)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def stays_here() -> AbstractContextManager[Any]:
    """Inside, what autograd saves stays where it is: for a backward that runs a forward of its own, whose
    tensors are wanted at once."""
    return torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)


def is_marked(storage: torch.UntypedStorage) -> bool:
    with _LOCK:
        ref = _MARKED.get(storage.data_ptr())
        return ref is not None and not ref.expired()


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an ordinary one with bytes: no subclass, fake, sparse or quantised one."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter)
    return plain and tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
