"""Contenders that are processes of their own and step in turn: whole training steps share no process."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from typing import Any


def resident_bytes(root: int) -> int:
    """The sum of the resident sets of a process and all below it."""
    parents: dict[int, list[int]] = {}
    sizes = {}
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents.setdefault(int(fields[1]), []).append(int(entry.name))
        sizes[int(entry.name)] = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    total, waiting = 0, [root]
    while waiting:
        process = waiting.pop()
        total += sizes.get(process, 0)
        waiting += parents.get(process, [])
    return total


class Contender:
    """A process that steps on command, and the most memory it and its children ever held."""

    def __init__(self, job: dict[str, Any], module: str) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process)
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        self.peak = 0
        threading.Thread(target=self._watch, daemon=True).start()
        self.start = self._read()

    def _watch(self) -> None:
        while self.process.poll() is None:
            self.peak = max(self.peak, resident_bytes(self.process.pid))
            time.sleep(0.25)

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise RuntimeError(f"a contender ended: {self.log.read().decode()[-2000:]}")
        return json.loads(line)

    def ask(self, word: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self._read()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@dataclass
class Measured:
    """One contender: what it said first, its steps, its peak, the ratios of paired steps to ours."""

    start: dict[str, Any]
    ms: list[float] = field(default_factory=list)
    ratio: list[float] = field(default_factory=list)
    processor_ratio: list[float] = field(default_factory=list)  # what a busy machine distorts less
    generation: list[float] = field(default_factory=list)  # share of the processor time, where a step has it
    peak: int = 0


def compare(ours: Contender, own: Measured, other: Contender, rounds: int) -> Measured:
    """Lets a peer step in turn with ours, and ends it."""
    found = Measured(other.start)
    for _ in range(rounds):
        step, peer = ours.ask("step"), other.ask("step")
        own.ms.append(step["ms"])
        found.ms.append(peer["ms"])
        found.ratio.append(peer["ms"] / step["ms"])
        found.processor_ratio.append(peer["cpu_ms"] / step["cpu_ms"])
        for measured, said in ((own, step), (found, peer)):
            measured.generation.append(said.get("generation_cpu_ms", 0.0) / said["cpu_ms"])
    other.end()
    found.peak = other.peak
    return found
