"""The commands of docs/start/tutorial.md with the output it shows, and the output they have here."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex

from monograph.__main__ import main
from monograph.cli import native
from support import native_tool
from support.page_blocks import blocks

PAGE = "docs/start/tutorial.md"
PREFIX = ["python", "-m", "monograph"]


def shown() -> list[tuple[str, str]]:
    """(command, output) for every `$ command` in a block."""
    found = []
    for block in (block for block in blocks() if (block.page, block.language) == (PAGE, "")):
        for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output.rstrip("\n")))
    return found


def run(command: str) -> str:
    """What the command prints, both streams together, in this process and folder."""
    words = shlex.split(command)
    out = io.StringIO()

    def run_native(arguments: list[str]) -> int:
        done = native_tool.run(*arguments)
        out.write(done.stdout + done.stderr)
        return done.returncode

    if words[0] == "ls":
        return "  ".join(sorted(os.listdir(words[1])))
    if words[0] == "monograph":
        run_native(words[1:])
        return out.getvalue().rstrip("\n")
    assert words[:3] == PREFIX, command
    becomes, native.exec_native = native.exec_native, run_native  # it would take this process with it
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            main(words[3:])
    finally:
        native.exec_native = becomes
    return out.getvalue().rstrip("\n")


def machine_independent(command: str, output: str) -> list[str]:
    """The output as sorted words for `ls`; else its lines without what differs between machines.

    Losses, speed, memory, time and the hash of the prepared data become #. A run tells where it is every ten
    seconds, so of its steps only the last counts. The bars of datasets and transformers are left out, and so
    is the table of a merge: norms of what was learned.
    """
    if command.startswith("ls "):
        return sorted(output.split())
    if " merge " in command:
        return [line for line in output.splitlines() if line.startswith(("wrote ", "Next: "))]
    left_out = r"\s*$|.*(it|examples)/s\]|step (\d+)/(?!\2 )"
    lines = [line.rstrip() for line in output.splitlines() if not re.match(left_out, line)]
    for pattern in (r"\b\d+\.\d{3,4}\b", r"[\d,]+(?= tokens/s)", r"[\d.]+(?= GiB)", r"\d:\d\d:\d\d"):
        lines = [re.sub(pattern, "#", line) for line in lines]
    return [re.sub(r"\b[0-9a-f]{16}\b", "#", line) for line in lines]
