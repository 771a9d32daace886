"""A method with code of its own: the tracer keeps graphs, and counts how often it made them, by code.

Of several steps in one process each would else count against the limit of all (8 recompiles), and what one
has seen (lengths that changed) would be known to the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

_NUMBERS = itertools.count()


def with_unique_code(method: Callable[..., Any]) -> Callable[..., Any]:
    """The bound method as another function; its graphs go when it goes."""
    assert isinstance(method, MethodType)
    plain = method.__func__
    assert isinstance(plain, FunctionType)
    name = f"{plain.__name__}_{next(_NUMBERS)}"
    code = plain.__code__.replace(co_name=name)
    own = FunctionType(code, plain.__globals__, name, plain.__defaults__, plain.__closure__)
    own.__kwdefaults__ = plain.__kwdefaults__
    return MethodType(own, method.__self__)
