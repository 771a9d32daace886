"""Commands with what they took: exit code, messages, seconds, the most memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

# Runs in a small process of its own: the peak of a child includes what its parent held when it was forked.
_MEASURE = """
import json, os, resource, subprocess, sys, tempfile, time
limit = int(sys.argv[1])
if limit:
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for command in json.load(sys.stdin):
    start = time.monotonic()
    output = tempfile.TemporaryFile()
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE)
    error = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall, busy = time.monotonic() - start, usage.ru_utime + usage.ru_stime
    # The time of its own work, as the machine may be busy with other things.
    output.seek(0)
    said = output.read().decode(errors="replace")
    print(json.dumps([process.returncode, error, min(wall, busy), usage.ru_maxrss * 1024, said]))
"""


class Measured(NamedTuple):
    code: int
    error: str
    seconds: float
    peak_bytes: int
    output: str


def measured_all(commands: Iterable[Iterable[Any]], address_space: int = 0) -> list[Measured]:
    """One after another; `address_space` bounds what each may reserve."""
    text = json.dumps([[str(part) for part in command] for command in commands])
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(address_space)],
        input=text,
        capture_output=True,
        text=True,
        check=True,
    )
    return [Measured(*json.loads(line)) for line in done.stdout.splitlines()]


def measured(command: Iterable[Any]) -> Measured:
    return measured_all([command])[0]
