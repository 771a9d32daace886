"""The native tool is one small program."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

from support.native_tool import program

# Without symbols, as the wheel installs it.
LIMIT = 6_000_000


def test_at_most_six_megabytes(tmp_path: pathlib.Path) -> None:
    copy = tmp_path / "monograph"
    shutil.copy(program(), copy)
    subprocess.run(["strip", copy], check=True)
    assert copy.stat().st_size <= LIMIT
