"""Containers whose class reads and writes in its own way are copied and put back as they are stored."""

from collections import OrderedDict, defaultdict, deque

import pytest
import torch
from transformers.activations import ClassInstantier

from monograph.training.regions.held import Held


class Doubled(list):
    def __iter__(self):
        return (2 * value for value in list.__iter__(self))


class Counted(dict):
    reads = 0

    def __getitem__(self, name):
        Counted.reads += 1
        return super().__getitem__(name)

    def __setitem__(self, name, value):
        super().__setitem__(name, ("written", value))


@pytest.mark.parametrize(
    "made",
    [
        lambda: ClassInstantier({"a": torch.nn.SiLU, "b": (torch.nn.GELU, {"approximate": "tanh"})}),
        lambda: OrderedDict(a=1, b=2),
        lambda: defaultdict(list, a=[1], b=2),
        lambda: Doubled([1, 2, 3]),
        lambda: Counted(a=1, b=2),
        lambda: deque([1, 2], maxlen=3),
        lambda: {1, 2},
    ],
)
def test_nothing_changed_and_put_back_leaves_what_is_stored(made):
    container = made()
    stored = _stored(container)
    held = Held("x", container)
    assert list(held.changed()) == []
    held.put_back()
    assert _stored(container) == stored


def _stored(container):
    if isinstance(container, dict):
        return list(dict.items(container))
    return list.copy(container) if isinstance(container, list) else list(container)


def test_what_was_changed_comes_back_in_its_order():
    container = ClassInstantier({"a": torch.nn.SiLU, "b": torch.nn.ReLU})
    held = Held("x", container)
    OrderedDict.__setitem__(container, "a", torch.nn.GELU)
    OrderedDict.__setitem__(container, "c", torch.nn.GELU)
    assert list(held.changed()) == ["x['a']", "x['c']"]
    held.put_back()
    assert list(dict.items(container)) == [("a", torch.nn.SiLU), ("b", torch.nn.ReLU)]
    assert list(container) == ["a", "b"]
