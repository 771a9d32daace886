"""World: the place of a process among those that a launcher started."""

import os
import pathlib

import pytest
import torch
import torch.distributed as dist

from monograph.distributed import alone, join, leave
from monograph.distributed.watchdog import together
from support.run_ranks import free_port, run_ranks


def places(world, word):
    return [world.rank, world.size, world.gathered(f"{word}{world.rank}"), world.of_first(world.rank + 7)]


def fails_on_one(world):
    if world.rank == 1:
        raise ValueError("wanted by the test")
    world.barrier()


def threads_of_gloo():
    names = [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
    return names.count("pt_gloo_runloop")


def threads_left(world, port):
    """Before and behind `leave`, and behind a watched run of its own."""
    dist.all_reduce(torch.ones(1000), group=world.group)
    found = [threads_of_gloo() > 0]
    leave(world)
    found.append(threads_of_gloo())
    os.environ["MASTER_PORT"] = str(port)
    with together(60) as watched:
        dist.all_reduce(torch.ones(1000), group=watched.group)
        found.append(threads_of_gloo() > 0)
    return [*found, threads_of_gloo()]


def test_no_thread_of_the_group_outlives_it():
    """One that frees a tensor while the interpreter goes down ends the process by signal 6."""
    wanted = [[True, 0, True, 0]] * 2
    assert run_ranks(2, "distributed/test_world:threads_left", free_port()) == wanted


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
