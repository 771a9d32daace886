"""The frozen tensors that a forward computed with, for its backward: references, no copies.

A graph carries a number from a forward to its backward, so forwards that saw the same tensors in the same
versions share one. Eager mode also holds the tensors themselves until backward, as autograd does.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from monograph.training.regions.trace import Traced
from monograph.upstream.torch_names import version_of

_LOCK = threading.Lock()
_NUMBERS = itertools.count()
_REMEMBERED = 64  # states of one layer that a compiled backward can still ask for


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


class Forward:
    """What backward reads of a layer: its trace, tensors, their versions, and the streams of its dropouts."""

    def __init__(self, traced: Traced, tensors: Sequence[torch.Tensor], streams: Sequence[int]) -> None:
        self.number, self.traced, self.streams = next(_NUMBERS), traced, list(streams)
        self.names = traced.read
        self.tensors = [weakref.ref(t) for t in tensors]
        self.versions = [_version(t) for t in tensors]

    def saw(self, traced: Traced, tensors: Sequence[torch.Tensor], streams: Sequence[int]) -> bool:
        if self.traced is not traced or self.streams != list(streams):
            return False
        pairs = zip(self.tensors, self.versions, tensors, strict=True)
        return all(ref() is t and version == _version(t) for ref, version, t in pairs)

    def held(self) -> list[torch.Tensor | None]:
        return [ref() for ref in self.tensors]

    def unchanged(self, word: str) -> dict[str, torch.Tensor]:
        """The tensors by name; raises if one is gone or was changed in place since."""
        found: dict[str, torch.Tensor] = {}
        for name, ref, version in zip(self.names, self.tensors, self.versions, strict=True):
            tensor = ref()
            if tensor is None:
                raise RuntimeError(
                    f"region {word}: {name} was replaced between forward and backward, and the forward's "
                    "tensor is gone; wanted it to be kept until backward"
                )
            if _version(tensor) != version:
                raise RuntimeError(
                    f"region {word}: {name}, needed for backward, was changed in place after the forward: it "
                    f"is at version {_version(tensor)}, wanted version {version}"
                )
            found[name] = tensor
        return found


_BY_NUMBER: weakref.WeakValueDictionary[int, Forward] = weakref.WeakValueDictionary()
_OF_LAYER: weakref.WeakKeyDictionary[Any, deque[Forward]] = weakref.WeakKeyDictionary()


def keep_forward(layer: Any, traced: Traced, tensors: dict[str, torch.Tensor], streams: Sequence[int]) -> int:
    """The number of a forward that runs now."""
    read = [tensors[name] for name in traced.read]
    with _LOCK:
        known = _OF_LAYER.setdefault(layer, deque(maxlen=_REMEMBERED))
        for forward in reversed(known):
            if forward.saw(traced, read, streams):
                return forward.number
        forward = Forward(traced, read, streams)
        known.append(forward)
        _BY_NUMBER[forward.number] = forward
        return forward.number


def forward_of(number: int, word: str) -> Forward:
    forward = _BY_NUMBER.get(number)
    if forward is None:
        raise RuntimeError(
            f"region {word}: its layer is gone, or its frozen tensors changed more than {_REMEMBERED} times "
            "since the forward; wanted the backward before that"
        )
    return forward
