"""LayerIndex: a layer's number that tells whether a forward computes with it.

All layers of one signature share one trace although their numbers differ. A forward hands the number on to a
cache, which is no use; one that asks whether it is even gets a trace for each number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

NAME = "layer_idx"


class LayerIndex(int):
    used: bool = False


def _telling(name: str) -> Callable[..., Any]:
    original = getattr(int, name)

    def method(self: LayerIndex, *others: Any) -> Any:
        self.used = True
        return original(int(self) if name == "__hash__" else self, *others)

    return method


_USES = (
    "eq ne lt le gt ge hash bool index add radd sub rsub mul rmul mod rmod floordiv rfloordiv truediv "
    "rtruediv and rand or ror xor rxor neg pos abs float str repr format pow rpow lshift rshift"
)
for _name in _USES.split():
    if hasattr(int, f"__{_name}__"):
        setattr(LayerIndex, f"__{_name}__", _telling(f"__{_name}__"))


def numbers_of(layer: nn.Module) -> tuple[int, ...]:
    return tuple(vars(m)[NAME] for m in layer.modules() if isinstance(vars(m).get(NAME), int))


@contextmanager
def watched(layer: nn.Module) -> Iterator[list[LayerIndex]]:
    """While it lasts the layer's numbers are LayerIndexes."""
    holders = [m for m in layer.modules() if isinstance(vars(m).get(NAME), int)]
    before = [vars(m)[NAME] for m in holders]
    indexes = [LayerIndex(number) for number in before]
    try:
        for module, index in zip(holders, indexes, strict=True):
            vars(module)[NAME] = index
        yield indexes
    finally:
        for module, number in zip(holders, before, strict=True):
            vars(module)[NAME] = number
