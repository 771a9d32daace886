"""The exit codes of every command, Python or native: `monograph --help` has the same table."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    OK = 0
    FINDING = 1
    USAGE = 2
    BAD_INPUT = 3
    MISMATCH = 4
    IO = 5
    MEMORY = 6
    INTERNAL = 70
    INTERRUPTED = 130


MEANINGS = {
    ExitCode.OK: "ok",
    ExitCode.FINDING: "a finding, or a threshold passed",
    ExitCode.USAGE: "wrong command line or recipe",
    ExitCode.BAD_INPUT: "wrong data: a file breaks a rule of its format",
    ExitCode.MISMATCH: "a manifest or the two sides of a diff disagree",
    ExitCode.IO: "disk full, no permission, no such file, program or package",
    ExitCode.MEMORY: "out of memory",
    ExitCode.INTERNAL: "failed for a reason that none of these is",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C; 143 by SIGTERM",
}


def table() -> str:
    return "Exit codes:\n" + "".join(f"  {code:<6d}{meaning}\n" for code, meaning in MEANINGS.items())
