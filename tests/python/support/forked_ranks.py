"""Ranks as forks of one process that has imported everything: a start costs what the run costs, not imports.

    with Launcher() as launcher:
        done = launcher.run(2, ["train", "recipe.yml"], restarts=1)
        done.exits      # one list of exit codes for each start, -9 for SIGKILL

It does as torchrun does: the store lives in a process of its own and keeps all keys from start to start, a
rank that fails ends the others by SIGTERM, then SIGKILL, and all start again. One thread a process: a fork
keeps none but its own.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from support import rank_program

_STORE = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
_GRACE = 30.0  # seconds from SIGTERM to SIGKILL, torchrun's


@dataclass
class Done:
    exits: list[list[int]] = field(default_factory=list)
    errors: list[list[str]] = field(default_factory=list)  # what each rank of a start has written
    seconds: list[float] = field(default_factory=list)
    ends: list[list[float]] = field(default_factory=list)  # when each rank of a start ended, time.time()


class Launcher:
    def __enter__(self) -> Launcher:
        self._store = subprocess.Popen(
            [sys.executable, "-c", _STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._runs = 0
        import_everything()
        assert self._store.stdout is not None
        self._port = self._store.stdout.readline().strip()
        return self

    def __exit__(self, *_: Any) -> None:
        assert self._store.stdin is not None
        self._store.stdin.close()
        self._store.wait()

    def run(
        self,
        ranks: int,
        arguments: list[str],
        *,
        restarts: int = 0,
        timeout: float = 300,
        env: dict[str, str] | None = None,
        meanwhile: Callable[[list[int]], None] | None = None,
    ) -> Done:
        """meanwhile(pids) is called about every 0.02 s while the first start runs."""
        self._runs += 1
        done = Done()
        for start in range(restarts + 1):
            place = {
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": self._port,
                "OMP_NUM_THREADS": "1",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RUN_ID": f"run-{self._runs}",
                "TORCHELASTIC_RESTART_COUNT": str(start),
                "MONOGRAPH_TEST_START": f"{self._runs}.{start}",
            }
            begun = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                pids = [self._fork(rank, arguments, place | (env or {}), folder) for rank in range(ranks)]
                exits, ends = _wait(pids, timeout, meanwhile if start == 0 else None)
                done.exits.append(exits)
                done.ends.append(ends)
                texts = [pathlib.Path(folder, f"{rank}.err").read_text() for rank in range(ranks)]
            done.seconds.append(time.monotonic() - begun)
            done.errors.append(texts)
            if not any(done.exits[-1]):
                break
        return done

    @staticmethod
    def _fork(rank: int, arguments: list[str], env: dict[str, str], folder: str) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.environ.update(env | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            with open(os.path.join(folder, f"{rank}.err"), "w", encoding="utf-8") as errors:
                os.dup2(errors.fileno(), 2)
                os.dup2(errors.fileno(), 1)
            code = rank_program.main(arguments)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            with contextlib.suppress(ValueError, OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)


def import_everything() -> None:
    import datasets  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import peft  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    import monograph.cli.train
    import monograph.hf.optimize
    import monograph.hf.peft.lora_experts
    import monograph.hf.transformers.loading
    import monograph.packing.unsupported_attention
    import monograph.recipe.run.train  # noqa: F401

    torch.set_num_threads(1)


def _wait(
    pids: list[int], timeout: float, meanwhile: Callable[[list[int]], None] | None
) -> tuple[list[int], list[float]]:
    """Exit codes of all, and when they ended; when one has failed, or time is over, the others are ended."""
    codes: dict[int, int] = {}
    ends: dict[int, float] = {}
    begun, ended = time.monotonic(), None
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    codes[pid], ends[pid] = os.waitstatus_to_exitcode(status), time.time()
        now = time.monotonic()
        left = [pid for pid in pids if pid not in codes]
        if meanwhile is not None:
            meanwhile(left)
        if ended is None and (any(codes.values()) or now - begun > timeout):
            ended = now
            for pid in left:
                os.kill(pid, signal.SIGTERM)
        elif ended is not None and now - ended > _GRACE:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[pid] for pid in pids], [ends[pid] for pid in pids]
