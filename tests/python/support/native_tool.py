"""The native program for tests: that of the release build, else the one that is installed."""

import json
import pathlib
import shutil
import subprocess
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[3]


def program(name: str = "monograph", folder: str = "cli") -> pathlib.Path:
    built = ROOT / "build" / "release" / folder / name
    found = str(built) if built.exists() else shutil.which(name)
    assert found, f"{name}: not built; cmake --preset release && cmake --build --preset release"
    return pathlib.Path(found)


def run(
    *arguments: Any, code: int = 0, name: str = "monograph", **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs `monograph ARGUMENTS`, or by another name; fails unless the exit code is `code`."""
    command = [name, *map(str, arguments)]
    done = subprocess.run(
        command, executable=program(), capture_output=True, text=True, timeout=600, **options
    )
    assert done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def run_json(*arguments: Any, code: int = 0) -> Any:
    return json.loads(run(*arguments, "--json", code=code).stdout)
