"""Environments in which calls of the C library fail, and digests of folders."""

from __future__ import annotations

import errno
import hashlib
import os
import pathlib
from typing import Any

from support.native_tool import program


def digest(folder: pathlib.Path) -> dict[str, str] | None:
    """Of every file below the folder; None if there is no folder."""
    if not folder.exists():
        return None
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def failing(
    call: str, at: int | None = None, code: Any = errno.EIO, count: pathlib.Path | None = None
) -> dict[str, str]:
    environment = os.environ | {
        "LD_PRELOAD": str(program("libfailing_calls.so")),
        "FAIL_CALL": call,
        "FAIL_ERRNO": str(code),
    }
    if at is not None:
        environment["FAIL_AT"] = str(at)
    if count is not None:
        environment["FAIL_COUNT"] = str(count)
    return environment
