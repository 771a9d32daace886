"""Ctrl-C, and the SIGTERM of a scheduler, as a question that a loop asks between its steps."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any, Protocol

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PASSED_ON = 2.0


class Asked(Protocol):
    """What a run asks of an interrupt."""

    deaf: bool

    @property
    def signal(self) -> int | None: ...

    @property
    def asked(self) -> bool: ...


class Interrupt:
    """SIGINT and SIGTERM ask for an end after the step; a second one ends at once.

    among_ranks: a launcher passes on the signal that the terminal has sent to all: what comes within two
    seconds is the first one still. If the block is left by an error, or with deaf = True, signals are ignored
    afterwards: torchrun ends all when the first of them has ended, and they have yet to say why.
    signal: the number of the one that asked. Handlers are those of before again when the block is left.
    Python gives signals to the main thread alone; in another nothing is changed.
    """

    def __init__(self, *, among_ranks: bool = False) -> None:
        self.signal: int | None = None
        self._among_ranks, self._since = among_ranks, 0.0
        self._before: dict[int, Any] = {}
        self.deaf = False

    @property
    def asked(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in _SIGNALS}
        return self

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        deaf = self.deaf or (self._among_ranks and error is not None)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if deaf else handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.asked:
            self.signal, self._since = number, now
        elif not (self._among_ranks and now - self._since < _PASSED_ON):
            raise KeyboardInterrupt
