"""Where each rank is: a heartbeat in the store, written before each phase and every second by a thread.

The heartbeats of the others tell, when a collective fails, who has not come to it: a rank whose heartbeat
grows old is gone or stopped, one with a young heartbeat of an earlier place is slow.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

BEAT = 1.0  # seconds between two heartbeats of a rank that does one thing
STALE = 3.0  # seconds after which a rank without a new heartbeat is gone or stopped
_READ_ALL_UP_TO = 64  # ranks; of more the heartbeats are read when they are needed

# In the order of a step, with the words for the place that a rank is in.
PHASES = {
    "start": "the start",
    "prepare": "the data being prepared",
    "load": "the model being loaded",
    "collate": "the collating of step {step}",
    "count": "the counting of targets of step {step}",
    "micro-batch": "the forward and backward of micro-batch {detail} of step {step}",
    "sum": "the sum of step {step}",
    "check": "the comparison after step {step}",
    "evaluation": "the evaluation after step {step}",
    "evaluated": "the sum of the evaluation after step {step}",
    "save": "the save after step {step}",
    "end": "the end",
}
_ORDER = {name: number for number, name in enumerate(PHASES)}


class StoreSilent(RuntimeError):
    """The process that keeps the heartbeats, or the way to it, is gone."""


@dataclass(frozen=True)
class Heartbeat:
    """beat: a count that grows while the process runs. since: when the phase began, by the rank's clock.

    over: why the rank has ended itself; empty while it works.
    """

    rank: int
    step: int = 0
    phase: str = "start"
    detail: str = ""
    beat: int = 0
    since: float = 0.0
    over: str = ""

    @property
    def place(self) -> tuple[int, int]:
        return self.step, _ORDER[self.phase]

    def words(self) -> str:
        return PHASES[self.phase].format(step=self.step, detail=self.detail)


@dataclass(frozen=True)
class Seen:
    """A heartbeat of another rank; age: seconds since this process first saw that beat."""

    heartbeat: Heartbeat
    age: float


class Heartbeats:
    """The heartbeats of all ranks. connect() gives a store of its own connection: a wait there blocks no
    other.

    timeout: seconds for which the store may be silent.
    """

    def __init__(self, rank: int, size: int, connect: Callable[[], Any], timeout: float) -> None:
        self.rank, self.size, self._connect, self.timeout = rank, size, connect, timeout
        self.step = 0
        self.own = Heartbeat(rank, since=time.time())
        self._writer, self._reader = connect(), connect()
        self.keys = connect()  # for what the main thread waits on
        self.turns: dict[str, int] = {}
        self.told_to_end: Callable[[], bool] = lambda: False  # whether a signal came
        self._seen: dict[int, tuple[Heartbeat, float]] = {}
        self._writing, self._reading = threading.Lock(), threading.Lock()
        self._ended = threading.Event()
        self._failing_since: float | None = None
        self._read_at = time.monotonic()
        self.at("start")
        self._thread = threading.Thread(target=self._beats, name="monograph heartbeats", daemon=True)
        self._thread.start()

    @property
    def reads_all(self) -> bool:
        """Whether the thread reads the heartbeats of the others too: their ages are always known then."""
        return self.size <= _READ_ALL_UP_TO

    def at(self, phase: str, detail: str = "", over: str = "") -> None:
        """What this rank does from now on. Raises if the store is gone."""
        if self.silent_for > self.timeout:
            raise StoreSilent(f"the store has not answered for {self.silent_for:.1f} s")
        with self._writing:
            self.own = Heartbeat(self.rank, self.step, phase, detail, self.own.beat + 1, time.time(), over)
            self._write()

    def _write(self) -> None:
        self._writer.set(self._key(self.rank), json.dumps(asdict(self.own)))

    def end(self, reason: str) -> None:
        """Says to the others that this rank ends itself: nobody waits for its beats."""
        self.stop(patience=2.0)  # whoever waits for this rank is told soon
        with contextlib.suppress(RuntimeError):  # no store: nobody can be told
            self.at(self.own.phase, self.own.detail, over=reason)

    def stop(self, patience: float = 10.0) -> None:
        """Ends the beats. Waits for one that is under way, `patience` seconds at most: a thread inside the
        store while Python ends would abort the process."""
        self._ended.set()
        self._thread.join(patience)

    @property
    def silent_for(self) -> float:
        """Seconds since the store began not to answer; 0 if it does."""
        return 0.0 if self._failing_since is None else time.monotonic() - self._failing_since

    def read(self) -> dict[int, Seen]:
        """The heartbeats of the other ranks, as new as the store gives them; else those of before."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        with self._reading:
            try:
                found = self._reader.multi_get([self._key(rank) for rank in others])
                for rank, text in zip(others, found, strict=True):
                    heartbeat = Heartbeat(**json.loads(text))
                    if rank not in self._seen or self._seen[rank][0] != heartbeat:
                        self._seen[rank] = heartbeat, time.monotonic()
                self._failing_since, self._read_at = None, time.monotonic()
            except RuntimeError:
                self._failing_since = self._failing_since or time.monotonic()
                with contextlib.suppress(RuntimeError):  # a late answer would be taken for the next one's
                    self._reader = self._connect()
        return self.known()

    def known(self) -> dict[int, Seen]:
        """The heartbeats that were read last. Asks nobody, so it waits for nobody."""
        now = time.monotonic()
        return {rank: Seen(heartbeat, now - when) for rank, (heartbeat, when) in dict(self._seen).items()}

    @property
    def unread_for(self) -> float:
        """Seconds since heartbeats could be read."""
        return time.monotonic() - self._read_at

    def _beats(self) -> None:
        while not self._ended.wait(BEAT):
            try:
                with self._writing:
                    self.own = replace(self.own, beat=self.own.beat + 1)
                    self._write()
            except RuntimeError:
                self._failing_since = self._failing_since or time.monotonic()
                with contextlib.suppress(RuntimeError), self._writing:
                    self._writer = self._connect()
            if self.reads_all:
                self.read()

    @staticmethod
    def _key(rank: int) -> str:
        return f"heartbeat/{rank}"
