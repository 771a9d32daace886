"""Which private names of torch a test is about; `test_private_names.py` wants each name to have a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from monograph.upstream.torch_names import NAMES, STRINGS

Test = TypeVar("Test", bound=Callable[..., object])


def relies_on(*names: str) -> Callable[[Test], Test]:
    """The test shows that torch does what the package relies on, not only that the name is there."""
    for name in names:
        if name not in NAMES and name not in STRINGS:
            raise KeyError(f"{name} is not in the table of private names")
    return lambda test: test
