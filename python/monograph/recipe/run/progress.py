"""What a person sees of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import resource
import time
from collections import deque
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

_BAR = 16  # columns
_EVERY = 10.0  # seconds between lines where there is no terminal


def peak_memory_kib() -> int:
    """The most memory this process has had. getrusage's begins with the peak of the process that started it:
    it is for kernels that tell nothing else."""
    with open("/proc/self/status", encoding="ascii") as file:
        own = (int(line.split()[1]) for line in file if line.startswith("VmHWM:"))
        return next(own, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def peak_memory_gib() -> float:
    return peak_memory_kib() / 2**20


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


class Reporter:
    """Counts steps, tokens and time; shows them."""

    def __init__(
        self, total: int, first: int, console: Console | None = None, *, quiet: bool = False
    ) -> None:
        self._console = console or Console(stderr=True, quiet=quiet)
        self._total, self._done = total, first
        self._recent: deque[tuple[float, int]] = deque([(time.perf_counter(), 0)], maxlen=20)
        self._traced = False
        self._tokens = 0
        self._told = 0.0
        # The bar has a width of its own: rich takes from it first where a terminal is narrow.
        self._bar = Progress(
            BarColumn(bar_width=_BAR, table_column=Column(min_width=_BAR)),
            TextColumn("{task.fields[figures]}", table_column=Column(no_wrap=True)),
            console=self._console,
            disable=quiet or not self._console.is_terminal,
        )
        self._task = self._bar.add_task(
            "", total=total, completed=first, figures=f"{first}/{total} compiling ..."
        )

    def __enter__(self) -> Reporter:
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._console.print(text, highlight=False, soft_wrap=True)
        self._console.file.flush()

    def pass_over(self) -> None:
        """A step that changed nothing."""
        self._done += 1
        self._bar.update(self._task, completed=self._done)

    def step(self, loss: float, tokens: int, efficiency: float, memory_gib: float | None = None) -> float:
        """After a step; gives tokens per second over the last steps. memory_gib: over ranks, if not here."""
        self._done += 1
        self._tokens += tokens
        now = time.perf_counter()
        self._recent.append((now, self._tokens))
        (then, before), steps = self._recent[0], len(self._recent) - 1
        speed = (self._tokens - before) / max(now - then, 1e-9)
        left = (self._total - self._done) * (now - then) / max(steps, 1)
        # By what must be seen first, in the order in which it is shown.
        figures = {
            "loss": f"loss {loss:.4f}",
            "speed": f"{speed:,.0f} tokens/s" if self._traced else f"first step {_clock(now - then)}",
            "memory": f"{memory_gib or peak_memory_gib():.1f} GiB",
            "filled": f"{efficiency:.0%} filled",
            "left": f"{_clock(left)} left" if self._traced else "",
        }
        count = f"{self._done}/{self._total}"
        shown = _fitting(count, figures, self._console.width - _BAR - 1)
        self._bar.update(self._task, completed=self._done, figures=shown)
        if not self._console.is_terminal and (now - self._told > _EVERY or self._done == self._total):
            self._told = now
            self.say(f"step {_fitting(count, figures, None)}")
        if not self._traced:  # the first step traces and compiles: its time says nothing of the next
            self._traced = True
            self._recent.clear()
            self._recent.append((now, self._tokens))
        return speed


def _fitting(count: str, figures: dict[str, str], width: int | None) -> str:
    """The figures in one line; those that are wanted least are left out until it is no wider than that."""
    kept = {name: text for name, text in figures.items() if text}
    for least in (None, "filled", "memory", "speed", "left"):
        kept.pop(least or "", None)
        line = f"{count} {' · '.join(kept.values())}"
        if width is None or len(line) <= width:
            break
    return line
