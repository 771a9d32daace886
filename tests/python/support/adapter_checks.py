"""`monograph adapter check` as tests call it, and adapters whose keys are renamed."""

from __future__ import annotations

import json
import pathlib
import subprocess
from collections.abc import Callable
from typing import Any

from support.native_tool import program


def check(folder: pathlib.Path, server: str, *more: Any) -> list[dict[str, Any]]:
    """The findings; the exit code says whether there are any."""
    command = [
        program(),
        "adapter",
        "check",
        folder / "base",
        folder / "adapter",
        "--for",
        server,
        "--json",
        *more,
    ]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 1), done.stderr
    findings = json.loads(done.stdout)["findings"]
    assert done.returncode == bool(findings)
    return findings


def renamed(old: str, new: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {name.replace(old, new): value for name, value in tensors.items()}
