"""The smoke test in new environments, one after the other: each is made, used and deleted.

    python tools/release/environments.py WHEEL 3.11:2.11.0 3.12:2.12.1 --record runs.jsonl

An environment is the Python `python3.12` of the path (or `~/.pyenv/versions/3.12.*`) and a version of torch
from the package index: about 5 GB each where that is a build with CUDA. Not part of CI.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
from typing import Any

SMOKE_TEST = pathlib.Path(__file__).with_name("smoke_test.py")


def python_of(version: str) -> str:
    kept = sorted(pathlib.Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    found = str(kept[-1]) if kept else shutil.which(f"python{version}")
    if found is None:
        raise SystemExit(f"python{version}: not on the path and not among pyenv's versions")
    return found


def without_settings() -> dict[str, str]:
    """The environment without what would lead to another package than the installed one."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "MONOGRAPH_TOOL")}


def try_environment(wheel: pathlib.Path, version: str, torch: str, folder: pathlib.Path) -> dict[str, Any]:
    subprocess.run([python_of(version), "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    began = time.monotonic()
    install = [python, "-m", "pip", "install", "-q", f"torch=={torch}", "safetensors", "numpy", str(wheel)]
    subprocess.run(install, check=True, env=without_settings())
    installed = time.monotonic()
    done = subprocess.run(
        [python, str(SMOKE_TEST)], capture_output=True, text=True, env=without_settings(), cwd=folder
    )
    found = {"asked": f"{version}:{torch}", "wheel": wheel.name, "passed": done.returncode == 0}
    if done.returncode == 0:
        found |= json.loads(done.stdout.splitlines()[-1])
    else:
        found["error"] = (done.stdout + done.stderr)[-2000:]
    seconds = {"install_seconds": installed - began, "smoke_seconds": time.monotonic() - installed}
    return found | {name: round(value, 1) for name, value in seconds.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=pathlib.Path)
    parser.add_argument("environments", nargs="+", metavar="PYTHON:TORCH")
    parser.add_argument("--record", type=pathlib.Path, help="a file of JSON lines to add to")
    arguments = parser.parse_args()
    failed = 0
    for environment in arguments.environments:
        version, _, torch = environment.partition(":")
        with tempfile.TemporaryDirectory() as folder:
            found = try_environment(arguments.wheel.resolve(), version, torch, pathlib.Path(folder) / "venv")
        failed += not found["passed"]
        print(json.dumps(found), flush=True)
        if arguments.record:
            with arguments.record.open("a") as file:
                file.write(json.dumps(found) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
