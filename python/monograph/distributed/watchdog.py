"""Ranks that fail, are killed, are slow or cannot be reached: the others end, and name them.

    with together(timeout=600) as world:
        path = by_first(world, "save", write)      # on rank 0; the others wait as long as it lives
        barrier(world, "load")                     # however long it takes whom, as long as all live

A collective that fails says nothing of who did not come. So each rank writes heartbeats (heartbeat.py), and
a rank that fails by itself leaves its error in the store before it ends.
"""

from __future__ import annotations

import json
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from monograph.distributed.heartbeat import STALE, Heartbeats, Seen, StoreSilent
from monograph.distributed.world import World, join, leave, store_address

_Result = TypeVar("_Result")
_STORE_SECONDS = 2.0  # of one question to the store while naming
_NAMING_SECONDS = STALE + 1.0  # until a rank that was killed has an old heartbeat
# What gloo and the store say when a rank or the way to it is gone: RuntimeErrors without their own class.
_LOST = re.compile(r"gloo|onnection (closed|reset|refused)|[Tt]imed out|[Bb]roken pipe|recv|socket", re.I)
_TIMED_OUT = re.compile(r"[Tt]imed out")


class RankFailure(RuntimeError):
    """Why a run over several ranks has ended, for people. code: the exit code of the process."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class RankMissing(RuntimeError):
    """A rank was waited for and is named."""


@contextmanager
def together(timeout: float, backend: str = "gloo") -> Iterator[World]:
    """The World of the launcher, watched. What ends one rank ends all: a RankFailure names the first."""
    world = join(timeout, backend)
    if world.size == 1:
        yield world
        return
    heartbeats = None
    if world.name:
        keys = replace(world, group=None).keys  # heartbeats do not keep the group
        heartbeats = Heartbeats(world.rank, world.size, partial(keys, _STORE_SECONDS), timeout)
        world = replace(world, heartbeats=heartbeats)
    try:
        barrier(world, "start")
        yield world
        barrier(world, "end")
    except BaseException as error:
        if heartbeats is None:
            raise
        failure = explained(world, error)
        heartbeats.end(str(failure))
        raise failure from error
    if heartbeats is not None:
        heartbeats.stop()
    leave(world)


def barrier(world: World, phase: str) -> None:
    """Returns when all ranks are here. Waits for ranks that work, not for those whose heartbeats stopped."""
    if world.size == 1:
        return
    if world.heartbeats is None:
        world.barrier()
        return
    world.doing(phase)
    key = f"met/{phase}/{_turn(world, phase)}"
    world.heartbeats.keys.add(key, 1)
    _wait(world, lambda: world.heartbeats.keys.add(key, 0) >= world.size, range(world.size))


def by_first(world: World, phase: str, work: Callable[[], _Result]) -> _Result:
    """What work() gives on rank 0, on all ranks: what JSON can write. Others wait as long as it lives."""
    if world.size == 1:
        return work()
    if world.heartbeats is None:
        return world.of_first(work() if world.first else None)
    world.doing(phase)
    key = f"first/{phase}/{_turn(world, phase)}"
    if world.first:
        result = work()
        world.heartbeats.keys.set(key, json.dumps(result))
        return result
    _wait(world, lambda: world.heartbeats.keys.check([key]), [0])
    return json.loads(world.heartbeats.keys.get(key))


def _turn(world: World, phase: str) -> int:
    """How often this phase has been waited for: all ranks count alike."""
    turns: dict[str, int] = world.heartbeats.turns
    turns[phase] = turns.get(phase, 0) + 1
    return turns[phase]


def _wait(world: World, done: Callable[[], bool], ranks: Any) -> None:
    pause, told = max(0.005, world.size / 10_000), time.monotonic()
    while not done():
        time.sleep(pause)
        pause = min(pause * 1.5, max(0.1, world.size / 10_000))
        if time.monotonic() - told > 1.0:
            told = time.monotonic()
            if world.heartbeats.keys.check(["failed"]):
                raise RankMissing("another rank has failed")  # its own words are in the store
            # A launcher that ends this rank has seen another one end.
            patience = STALE if world.heartbeats.told_to_end() else max(world.timeout, STALE)
            for rank, seen in world.heartbeats.read().items():
                if rank in ranks and seen.age > patience and not seen.heartbeat.over:
                    raise RankMissing(_lost(world, rank, seen))


def explained(world: World, error: BaseException) -> RankFailure:
    """The error with the rank that failed first, which is told to the others through the store."""
    me = f"rank {world.rank} of {world.size}"
    if isinstance(error, RankFailure):
        return error
    if not _is_lost(error):
        what = " ".join(f"{type(error).__name__}: {error}".split())
        reported = _first_failure(world, what, own=True)
        expected = isinstance(error, (ValueError, OSError, KeyboardInterrupt))
        code = 130 if isinstance(error, KeyboardInterrupt) else 3 if expected else 1
        if reported["rank"] != world.rank and reported["text"] == what:
            return RankFailure("", code)  # said by that rank
        detail = "" if expected else "\n" + "".join(traceback.format_exception(error)).rstrip()
        return RankFailure(f"{me}: error: {what}{detail}", code)
    own = world.heartbeats.own
    _in_time(lambda: world.heartbeats.at(own.phase, own.detail, over="lost the others"))
    first = _failure_of_another(world) or _first_failure(world, _named(world, error), own=False)
    if first["own"]:
        return RankFailure(f"{me}: ended because rank {first['rank']} failed first: {first['text']}", 1)
    return RankFailure(f"{me}: {first['text']}", 1)


def _is_lost(error: BaseException) -> bool:
    if isinstance(error, (RankMissing, StoreSilent, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and bool(_LOST.search(str(error)))


def _first_failure(world: World, text: str, *, own: bool) -> dict[str, Any]:
    """Leaves `text` as what ended the run unless another rank was first; gives that of the first."""
    mine = {"rank": world.rank, "text": text, "own": own}
    said = json.dumps(mine)
    found = _in_time(lambda: world.keys(_STORE_SECONDS).compare_set("failed", "", said))
    return mine if found is None else dict(json.loads(found))


def _failure_of_another(world: World) -> dict[str, Any] | None:
    def ask() -> Any:
        keys = world.keys(_STORE_SECONDS)
        return keys.get("failed") if keys.check(["failed"]) else None

    found = _in_time(ask)
    return None if found is None else dict(json.loads(found))


def _in_time(question: Callable[[], _Result]) -> _Result | None:
    """What the store says to a question; None if it says nothing in time: a connection may hang for longer
    than its own timeout when the network is down."""
    said: list[_Result] = []

    def ask() -> None:
        with suppress(RuntimeError):
            said.append(question())

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_STORE_SECONDS / 2)
    return said[0] if said else None


def _store_answers(world: World) -> bool:
    return _in_time(lambda: world.keys(_STORE_SECONDS).check(["failed"])) is not None


def _named(world: World, error: BaseException) -> str:
    return str(error) if isinstance(error, RankMissing) else named_by_heartbeats(world, error)


def named_by_heartbeats(world: World, error: BaseException) -> str:
    """Who did not come, from the heartbeats, once they are old enough to tell."""
    own, end = world.heartbeats.own, time.monotonic() + _NAMING_SECONDS
    here = own.words()
    while True:
        heartbeats = world.heartbeats.known() if world.heartbeats.reads_all else world.heartbeats.read()
        seen = {rank: one for rank, one in heartbeats.items() if not one.heartbeat.over}
        silent = {rank: one for rank, one in seen.items() if one.age > STALE}
        behind = {rank: one for rank, one in seen.items() if one.heartbeat.place < own.place}
        found = {rank: one for rank, one in silent.items() if rank in behind} or silent
        if not found and _TIMED_OUT.search(str(error)):
            found = behind  # slow, and alive
        if (found and world.heartbeats.reads_all) or time.monotonic() > end:
            break
        time.sleep(0.2)
        if world.heartbeats.unread_for < STALE and (first := _failure_of_another(world)):
            return str(first["text"])
    found = found or behind
    store = ""
    if not _store_answers(world):
        address = "{}:{}".format(*store_address())
        store = f"; the store at {address} does not answer: the launcher, its host or the network is gone"
    if not found:
        return f"no other rank came to {here}, and none is known to be behind{store}: {_one_line(error)}"
    return "; ".join(_lost(world, rank, one) for rank, one in sorted(found.items())) + store


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _lost(world: World, rank: int, seen: Seen) -> str:
    own, there = world.heartbeats.own, seen.heartbeat
    how = "did not reach" if there.place < own.place else "was lost in"
    if seen.age > STALE:
        where = f"last seen {seen.age:.1f} s ago in {there.words()}"
    else:
        where = f"it lives, since {max(0.0, time.time() - there.since):.1f} s in {there.words()}"
    return f"rank {rank} of {world.size} {how} {own.words()}: {where}"
