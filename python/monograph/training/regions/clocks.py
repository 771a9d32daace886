"""Calls of built-in functions that no trace can hold: clocks, the system's random numbers, the terminal."""

from __future__ import annotations

import builtins
import os
import time
from datetime import date
from typing import Any

_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
_CLOCKS_NAMED = [n for name in _CLOCKS for n in (name, f"{name}_ns")]
_OTHERS = {
    **{id(getattr(time, name)): f"it reads the clock (time.{name})" for name in _CLOCKS_NAMED},
    id(builtins.print): "it prints",
    id(builtins.input): "it asks for input",
    id(builtins.open): "it opens a file",
}
_SYSTEM = {id(os.urandom): "it draws from the system's generator (os.urandom)"}
_TODAY = ("now", "utcnow", "today")


def impure_call(function: Any, trusted: bool) -> str | None:
    """Why a call of a built-in function is not the same each time; None if it is. Code that is trusted, as
    logging, may read clocks, but not draw."""
    if (reason := _SYSTEM.get(id(function))) is not None or trusted:
        return reason
    if (reason := _OTHERS.get(id(function))) is not None:
        return reason
    of = getattr(function, "__self__", None)
    if isinstance(of, type) and issubclass(of, date) and function.__name__ in _TODAY:
        return f"it reads the clock ({of.__name__}.{function.__name__})"
    return None
