"""World: the place of a process among those that a launcher started."""

import pytest

from monograph.distributed import alone, join
from support.run_ranks import run_ranks


def places(world, word):
    return [world.rank, world.size, world.gathered(f"{word}{world.rank}"), world.of_first(world.rank + 7)]


def fails_on_one(world):
    if world.rank == 1:
        raise ValueError("wanted by the test")
    world.barrier()


def test_ranks_know_each_other():
    assert run_ranks(3, "distributed/test_world:places", "a") == [
        [r, 3, ["a0", "a1", "a2"], 7] for r in range(3)
    ]


def test_a_rank_that_fails_is_named():
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 ended with 1:[\s\S]*wanted by the test"):
        run_ranks(2, "distributed/test_world:fails_on_one")


def test_one_process_is_alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join() == alone()
    assert alone().gathered(3) == [3]
    assert alone().of_first(4) == 4
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="WORLD_SIZE is 2, but RANK, MASTER_ADDR, MASTER_PORT is not set"):
        join()
    monkeypatch.setenv("WORLD_SIZE", "none")
    with pytest.raises(ValueError, match="WORLD_SIZE is 'none', wanted a number of processes"):
        join()
