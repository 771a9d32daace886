"""What `doctor` says while it works: compiling a large model takes minutes."""

from __future__ import annotations

import sys
import time


class Progress:
    """Lines on stderr with the seconds since the start; none if `shown` is False."""

    def __init__(self, shown: bool = True) -> None:
        self._shown, self._began = shown, time.perf_counter()

    def say(self, text: str) -> None:
        if self._shown:
            seconds = time.perf_counter() - self._began
            print(f"doctor: {seconds:6.1f} s  {text}", file=sys.stderr, flush=True)

    def traces(self, steps: int) -> None:
        self.say(
            f"traces forward and backward of {steps} steps; generates no code; the first step takes longest"
        )

    def generates(self, steps: int) -> None:
        self.say(f"compiles with Inductor and runs {steps} steps; the first step takes longest")
