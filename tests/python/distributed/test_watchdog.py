"""Ranks as threads of one process with a store between them: names, waiting, who is said to be missing."""

import subprocess
import sys
import threading
import time

import pytest
from torch.distributed import PrefixStore, TCPStore

from monograph.distributed import heartbeat, watchdog
from monograph.distributed.heartbeat import Heartbeats
from monograph.distributed.store_prefix import store_prefix
from monograph.distributed.watchdog import RankMissing, barrier, by_first, explained
from monograph.distributed.world import World


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def connect(store):
    return lambda: TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)


def on_threads(*work):
    """What each of the functions gives, all at the same time."""
    found = [None] * len(work)

    def run(place, function):
        try:
            found[place] = function()
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(work)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def names(connect, size):
    return on_threads(*(lambda r=rank: store_prefix(connect(), r, size, 20) for rank in range(size)))


def test_every_start_has_a_name_of_its_own(connect):
    """The keys of ranks that died while they joined are there still."""
    left = connect()
    left.set("monograph/hello/3/1", "dead")
    left.set("monograph/hello/3/2", "dead too")
    seen = {name for _ in range(3) for name in names(connect, 3)}
    assert len(seen) == 3
    assert all(name.startswith("monograph/") for name in seen)


def test_a_rank_that_does_not_join_is_named(connect):
    missing = on_threads(
        lambda: store_prefix(connect(), 0, 3, 0.5), lambda: store_prefix(connect(), 2, 3, 20)
    )
    assert str(missing[0]) == "rank 1 of 3 has not joined in 0 s"


@pytest.fixture
def worlds(connect, monkeypatch):
    """worlds(n): n ranks with marks that beat ten times a second and are old after half a second."""
    monkeypatch.setattr(heartbeat, "BEAT", 0.1)
    monkeypatch.setattr(watchdog, "STALE", 0.5)
    monkeypatch.setattr(watchdog, "_NAMING_SECONDS", 1.5)
    monkeypatch.setattr(World, "keys", lambda self, timeout: PrefixStore(self.name, connect()))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    made = []

    def make(size, timeout=10.0):
        for rank in range(size):
            one = Heartbeats(rank, size, lambda: PrefixStore("test", connect()), timeout)
            one.step = 7
            made.append(one)
        return [World(r, size, r, None, timeout, "test", own) for r, own in enumerate(made)]

    yield make
    for one in made:
        one.stop()


# A beat waits in the store, in C++ and without Python's lock, while Python ends slowly.
ENDS_IN_A_BEAT = """
import datetime, sys, time
from torch.distributed import TCPStore
from monograph.distributed import heartbeat

heartbeat.BEAT = 0.01
store = TCPStore("127.0.0.1", 0, is_master=True, timeout=datetime.timedelta(seconds=0.5))
waiting = []

class Silent:
    def set(self, key, text):
        if waiting:
            store.wait(["never"])

    def multi_get(self, keys):
        return []

class Late:
    def __del__(self):
        time.sleep(1)

one = heartbeat.Heartbeats(0, 1, Silent, 10.0)
waiting.append(one)
time.sleep(0.2)
sys.late = Late()
one.stop()
"""


def test_a_process_whose_last_beat_is_not_answered_ends_with_its_own_code():
    """It ended with signal 6: terminate called without an active exception."""
    words = [sys.executable, "-c", ENDS_IN_A_BEAT]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


def test_rank_0_works_and_the_others_get_what_it_gives(worlds):
    first, second, third = worlds(3)
    for turn in range(3):
        work = [lambda w=w, t=turn: by_first(w, "save", lambda: [w.rank, t]) for w in (first, second, third)]
        assert on_threads(*work) == [[0, turn]] * 3
    assert on_threads(*(lambda w=w: barrier(w, "load") for w in (first, second, third))) == [None] * 3


def test_waiting_lasts_as_long_as_rank_0_lives(worlds):
    first, second = worlds(2, timeout=0.8)

    def slowly():
        time.sleep(2.5)
        return "done"

    both = on_threads(lambda: by_first(first, "prepare", slowly), lambda: by_first(second, "prepare", slowly))
    assert both == ["done", "done"]
    first.heartbeats.stop()
    lost = on_threads(lambda: by_first(second, "save", slowly))[0]
    assert isinstance(lost, RankMissing)
    assert str(lost).startswith("rank 0 of 2 did not reach the save after step 7: last seen ")


def failure(world, error, phase="sum"):
    world.doing(phase)
    return str(explained(world, error))


def test_a_dead_rank_is_named_with_its_step_and_place(worlds):
    first, second, third = worlds(3)
    for world in (first, third):
        world.doing("sum")
    second.doing("micro-batch", "3")
    second.heartbeats.stop()
    closed = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:5")
    said = failure(first, closed)
    assert said.startswith("rank 0 of 3: rank 1 of 3 did not reach the sum of step 7: last seen ")
    assert said.endswith(" s ago in the forward and backward of micro-batch 3 of step 7")
    # Whoever fails later repeats what the first has found.
    assert failure(third, closed) == said.replace("rank 0 of 3: ", "rank 2 of 3: ", 1)


def test_a_slow_rank_is_named_when_the_time_is_over(worlds):
    first, second = worlds(2)
    second.doing("micro-batch", "0")
    first.doing("sum")
    time.sleep(0.7)
    said = failure(first, RuntimeError("gloo: Timed out waiting 10000ms for recv operation to complete"))
    assert "rank 1 of 2 did not reach the sum of step 7: it lives, since " in said


def test_a_rank_killed_in_the_same_place_is_found_by_its_silence(worlds):
    first, second, _third = worlds(3)
    for world in (first, second, _third):
        world.doing("sum")
    second.heartbeats.stop()
    said = failure(first, RuntimeError("Connection reset by peer"))
    assert said.startswith("rank 0 of 3: rank 1 of 3 was lost in the sum of step 7: last seen ")


def test_the_error_of_the_first_rank_is_told_by_all(worlds, monkeypatch):
    monkeypatch.setattr("monograph.distributed.watchdog._STORE_SECONDS", 30.0)  # a busy machine answers late
    first, second = worlds(2)
    own = explained(second, ValueError("a wrong\n row"))
    assert (str(own), own.code) == ("rank 1 of 2: error: ValueError: a wrong row", 3)
    lost = explained(first, RuntimeError("gloo: Connection closed by peer"))
    expected = "rank 0 of 2: ended because rank 1 failed first: ValueError: a wrong row"
    assert (str(lost), lost.code) == (expected, 1)
    # What all ranks find out by themselves is said once.
    assert str(explained(first, ValueError("a wrong row"))) == ""


def test_a_store_that_is_gone_is_said(worlds, connect, monkeypatch):
    first, _second = worlds(2)
    time.sleep(0.3)

    def nothing(*_):
        raise RuntimeError("failed to recv, got 0 bytes")

    monkeypatch.setattr(first.heartbeats, "_connect", nothing)
    monkeypatch.setattr(World, "keys", nothing)
    first.heartbeats._reader = type("Gone", (), {"multi_get": nothing})()
    time.sleep(0.7)  # a collective waits for longer
    said = failure(first, RuntimeError("gloo: Timed out waiting 10000ms"))
    assert "the store at 127.0.0.1:1 does not answer" in said
    assert "rank 1 of 2 did not reach the sum of step 7: last seen" in said
