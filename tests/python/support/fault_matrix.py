"""Ranks killed, stopped, slowed and cut off in every way that the project promises to survive.

    PYTHONPATH=tests/python python -m support.fault_matrix --json >bench/results/faults.jsonl
    PYTHONPATH=tests/python python -m support.fault_matrix --sharded --only kills

A case is right if the run that starts again has the losses and the adapter of the unbroken run, to the bit,
and computed each micro-batch once in every step. Stopped, slow and cut off ranks must be named, with the
step, within ddp_timeout + 5 s. Exit code 1 if a case is not right. Cutting off needs root: it takes a network
namespace.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from support.forked_ranks import Done, Launcher
from support.rank_program import POINTS
from support.rank_runs import Runs

SECTIONS = ("kills", "random", "resize", "stopped", "cut_off", "torchrun")
STEPS, TIMEOUT, BOUND = 5, 10, 5.0
# Twelve micro-batches and as many leaves; an evaluation after steps 2 and 4, checkpoints after 2 and 4.
KEYS = {"gradient_accumulation_steps": 12, "max_steps": STEPS, "eval_steps": 2, "torch_compile": None}


class Matrix:
    def __init__(self, root: pathlib.Path, launcher: Launcher, *, sharded: bool, mode: str) -> None:
        self.sharded = sharded
        self.runs = Runs(root, launcher, documents=300, **KEYS, step_mode=mode)
        self.numbers = 0
        self.whole: dict[str, Any] = {}

    def keys(self, ranks: int, **change: Any) -> dict[str, Any]:
        return ({"shard_size": ranks} if self.sharded and ranks > 1 else {}) | change

    def unbroken(self) -> Iterator[dict[str, Any]]:
        for ranks in (1, 2):
            done = self.runs.run(f"whole-{ranks}", ranks, keys=self.keys(ranks))
            left = self.runs.left(f"whole-{ranks}")
            self.whole = self.whole or left
            yield self.result(f"whole-{ranks}", done, case="unbroken", ranks=ranks)
        self.seconds = done.seconds[0]

    def result(self, name: str, done: Done, **about: Any) -> dict[str, Any]:
        left = self.runs.left(name)
        told = sorted({line for start in done.errors for text in start for line in _naming(text)})
        dealt = self.runs.dealt(name) if about.get("ranks", 2) > 1 else ""
        return about | {
            "sharded": self.sharded,
            "mode": self.runs.change["step_mode"],
            "same": left["adapter"] == self.whole["adapter"] and left["trace"] == self.whole["trace"],
            "dealt": dealt or "once",
            "adapter": left["adapter"][:16],
            "exits": done.exits,
            "seconds": [round(value, 1) for value in done.seconds],
            "named": told,
        }

    def case(self, about: dict[str, Any], ranks: int, restarts: int = 1, **how: Any) -> dict[str, Any]:
        self.numbers += 1
        name = f"case-{self.numbers}"
        done = self.runs.run(
            name, ranks, keys=self.keys(ranks, **how.pop("keys", {})), restarts=restarts, **how
        )
        found = self.result(name, done, **about)
        if "within" in about:
            struck = float((self.runs.root / f"{name}.log" / "struck").read_text())
            named = [end for end, code in zip(done.ends[0], done.exits[0], strict=True) if code == 1]
            found["within"] = round(min(named) - struck, 1) if named else None
            words = " ".join(found["named"])
            found["same"] &= bool(named) and found["within"] <= TIMEOUT + BOUND
            found["same"] &= bool(re.search(r"rank \d of \d (did not reach|was lost in) .*step \d", words))
        self.runs.forget(name)
        return found

    def kills(self) -> Iterator[dict[str, Any]]:
        steps = {"load": 1, "in save": 4, "after save": 2, "in evaluation": 2}
        for point in POINTS:
            for rank in (0, -1):
                kill = f"{point}:{rank}:{steps.get(point, 3)}"
                about = {"case": "kill -9", "point": point, "rank": "first" if rank == 0 else "last"}
                yield self.case(about, 2, kill=kill)

    def random(self) -> Iterator[dict[str, Any]]:
        for seed in range(20):
            numbers = random.Random(seed)
            rank, when = numbers.choice((0, -1)), numbers.uniform(0.2, self.seconds)
            found: dict[str, Any] = {"exits": [[0, 0]]}
            while found["exits"] == [[0, 0]]:  # the run was over before: sooner
                about = {"case": "kill -9 at a random time", "after": round(when, 2), "rank": rank}
                found = self.case(about, 2, meanwhile=_killer(rank, when))
                when *= 0.6
            yield found

    def resize(self) -> Iterator[dict[str, Any]]:
        """2 ranks, then 4, then 3, then 1; all but the last are killed on the way."""
        plan = ((2, "after backward:-1:3"), (4, "in the sum:0:1"), (3, "after the optimiser:-1:5"), (1, ""))
        whole = Done()
        for ranks, kill in plan:
            options = ("--auto-resume-from-checkpoints",)
            done = self.runs.run("resize", ranks, *options, kill=kill, keys=self.keys(ranks))
            for name in ("exits", "errors", "seconds"):
                getattr(whole, name).extend(getattr(done, name))
        yield self.result("resize", whole, case="kill -9 and another number of ranks", sizes=[2, 4, 3, 1])

    def stopped(self) -> Iterator[dict[str, Any]]:
        keys = {"ddp_timeout": TIMEOUT}
        for case, kill in (
            ("SIGSTOP", "before forward:-1:3:19"),
            ("SIGSTOP", "before forward:0:3:19"),
            ("slow for 25 s", "slow:-1:3:25"),
        ):
            about = {"case": case, "rank": "first" if ":0:" in kill else "last", "within": None}
            yield self.case(about, 2, kill=kill, keys=keys)

    def cut_off(self) -> Iterator[dict[str, Any]]:
        """The loopback is down for 20 s from the third step on. Inside of a network namespace."""
        self.numbers += 1
        name = f"case-{self.numbers}"
        lost = _Cut(self.runs.root / name / "metrics.jsonl")
        keys = self.keys(2, ddp_timeout=TIMEOUT)
        done = self.runs.run(name, 2, keys=keys, restarts=3, meanwhile=lost)
        found = self.result(name, done, case="loopback down for 20 s")
        named = [end for end, code in zip(done.ends[0], done.exits[0], strict=True) if code == 1]
        found["within"] = round(min(named) - lost.since, 1) if named and lost.since else None
        found["same"] &= found["within"] is not None and found["within"] <= TIMEOUT + BOUND
        words = " ".join(found["named"])
        found["same"] &= bool(re.search(r"rank \d of \d (did not reach|was lost in) .*step \d", words))
        yield found

    def torchrun(self) -> Iterator[dict[str, Any]]:
        """By the program itself."""
        for point, rank in (("after backward", -1), ("in save", 0)):
            self.numbers += 1
            name = f"case-{self.numbers}"
            log = self.runs.root / f"{name}.log"
            log.mkdir()
            program = pathlib.Path(__file__).with_name("rank_program.py")
            launcher = [
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "2",
                "--max-restarts",
                "1",
            ]
            recipe = self.runs.recipe(name, **self.keys(2))
            environment = os.environ | {"OMP_NUM_THREADS": "1", "MONOGRAPH_TEST_LOG": str(log)}
            environment["MONOGRAPH_TEST_KILL"] = f"{point}:{rank}:4"
            begun = time.monotonic()
            command = [sys.executable, "-m", *launcher, str(program), "train", recipe]
            ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
            done = Done([[ended.returncode]], [[ended.stderr]], [time.monotonic() - begun])
            about = {
                "case": "torchrun --max-restarts",
                "point": point,
                "rank": "first" if rank == 0 else "last",
            }
            yield self.result(name, done, **about)


def _naming(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.match(r"rank \d+ of \d+: ", line)]


def _killer(rank: int, when: float) -> Callable[[list[int]], None]:
    begun = time.monotonic()
    struck: list[bool] = []

    def kill(pids: list[int]) -> None:
        if not struck and time.monotonic() - begun > when and len(pids) == 2:
            struck.append(True)
            os.kill(pids[rank], 9)

    return kill


class _Cut:
    """Takes the loopback down for 20 s once two steps are in the metrics."""

    def __init__(self, metrics: pathlib.Path) -> None:
        self.metrics, self.since = metrics, 0.0

    def __call__(self, pids: list[int]) -> None:
        if not self.since and self.metrics.is_file() and self.metrics.read_text().count('"loss"') >= 2:
            subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
            self.since = time.time()
            threading.Timer(
                20.0, lambda: subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            ).start()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a case")
    parser.add_argument(
        "--sharded", action="store_true", help="shard_size: the base is sharded across the ranks"
    )
    parser.add_argument("--mode", default="graph", help="step_mode of the runs; graph")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="these sections; all")
    options = parser.parse_args()
    sections = options.only or SECTIONS
    if "cut_off" in sections and os.environ.get("MONOGRAPH_TEST_NAMESPACE") != "1":
        # All of it runs in a network of its own, so that the loopback of the machine stays up.
        os.environ |= {"MONOGRAPH_TEST_NAMESPACE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        os.execvp("unshare", ["unshare", "--net", sys.executable, *sys.argv])
    if os.environ.get("MONOGRAPH_TEST_NAMESPACE") == "1":
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    right = True
    with tempfile.TemporaryDirectory() as root, Launcher() as launcher:
        matrix = Matrix(pathlib.Path(root), launcher, sharded=options.sharded, mode=options.mode)
        for section in ("unbroken", *sections):
            for result in getattr(matrix, section)():
                right &= result["same"] and result["dealt"] == "once"
                shown = result if options.json else {k: v for k, v in result.items() if k != "adapter"}
                print(json.dumps(shown) if options.json else shown, flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
