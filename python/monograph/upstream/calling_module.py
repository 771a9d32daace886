"""Which module calls a function: the last resort where two libraries ask alike for different things."""

from __future__ import annotations

import inspect


def calling_module(frames: int) -> str:
    """The name of the module `frames` calls up: 1 is the one that calls this function."""
    frame = inspect.currentframe()
    for _ in range(frames):
        frame = None if frame is None else frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))
