"""Functions of tests on several ranks: each in a process of its own, joined as torchrun joins them.

    results = run_ranks(2, "distributed/test_tree:one_sum", 12)  # one_sum(world, 12); one result a rank

A result is whatever JSON can write. Starting a rank costs seconds: a test puts its cases into one function.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).resolve().parents[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def message(work: Callable[[], object]) -> str:
    """The error that `work` raises, as a rank can tell it."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def run_ranks(ranks: int, function: str, *args: Any, timeout: float = 300, env: Any = None) -> list[Any]:
    """`room/file:function` of tests/python with (world, *args) on `ranks` ranks; what each returned.

    Raises with the standard error of the first rank that failed, after killing the others.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
            given = {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
            out = Path(folder, f"{rank}.json")
            with open(Path(folder, f"{rank}.err"), "wb") as errors:
                command = [sys.executable, __file__, function, json.dumps(args), str(out)]
                environ = os.environ | {"OMP_NUM_THREADS": "1"} | given | (env or {})
                started.append(subprocess.Popen(command, env=environ, stdout=errors, stderr=errors))
        try:
            _wait(started, Path(folder), function, timeout)
        finally:
            for process in started:
                process.kill()
                process.wait()
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def smaller_worlds(world: Any, sizes: list[int]) -> list[Any]:
    """The Worlds of the first ranks, of these sizes, that this rank is in: one start of processes for all."""
    import torch.distributed as dist

    from monograph.distributed import World

    groups = [dist.new_group(list(range(size))) for size in sizes]  # every rank makes every group
    found = zip(sizes, groups, strict=True)
    return [World(world.rank, size, world.rank, group) for size, group in found if world.rank < size]


def _wait(started: list[subprocess.Popen[bytes]], folder: Path, function: str, timeout: float) -> None:
    end = time.monotonic() + timeout
    while any(process.poll() is None for process in started):
        failed = [rank for rank, process in enumerate(started) if process.poll() not in (None, 0)]
        if failed or time.monotonic() > end:
            break
        time.sleep(0.02)
    for rank, process in enumerate(started):
        code = process.poll()
        if code != 0:
            why = f"ended with {code}" if code is not None else "did not end"
            if code is None and any(p.poll() not in (None, 0) for p in started):
                continue  # it waits for the one that failed
            text = Path(folder, f"{rank}.err").read_text(errors="replace")
            raise RuntimeError(f"{function}: rank {rank} of {len(started)} {why}:\n{text[-6000:]}")


def _module(file: str) -> ModuleType:
    """The file by its path: a room's name may be that of an installed package."""
    name = file.replace("/", ".")
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{file}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(function: str, args: str, out: str) -> None:
    import torch

    torch.set_num_threads(1)
    from monograph.distributed import join, leave

    sys.path.insert(0, str(FOLDER))
    file, _, name = function.partition(":")
    world = join(timeout=120)
    result = getattr(_module(file), name)(world, *json.loads(args))
    Path(out).write_text(json.dumps(result))
    leave(world)


if __name__ == "__main__":
    main(*sys.argv[1:])
