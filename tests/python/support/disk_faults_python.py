"""Calls that a disk may refuse, refused in turn in `monograph preprocess` and `train`: a smaller sweep.

    PYTHONPATH=tests/python python -m support.disk_faults_python --points 4 --json

The process loads the library of failing calls and imports everything once; each run is a fork of it. A point
is lost if the exit code is not 5 or 6, if no line names the path that failed, if a checkpoint or an adapter
that is there cannot be read whole, or if the command, run again, does not give the losses and the adapter of
the unharmed run. Spilled activations that cannot be written end the run, and nothing of them stays.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import os
import pathlib
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from support.disk_faults import CODES, Fault
from support.failing_calls import failing

CHOSEN = [
    Fault("write", errno.ENOSPC),
    Fault("write", errno.EIO),
    Fault("write", errno.EINTR),
    Fault("write", 0),
    Fault("pwrite", errno.ENOSPC),
    Fault("pwrite", 0),
    Fault("create", errno.EROFS),
    Fault("fsync", errno.EIO),
    Fault("rename", errno.EIO),
    Fault("mkdir", errno.ENOSPC),
]


class Sweep:
    """Runs of one command in forks; what is written lies below `work`."""

    def __init__(
        self, work: pathlib.Path, arguments: list[str], state: Callable[[pathlib.Path], Any]
    ) -> None:
        self.work, self.arguments, self.state = work, arguments, state
        self.layer = ctypes.CDLL(None)
        self.reset()
        code, said = self.run()
        assert code == 0, said
        self.new = state(work)

    def reset(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        (self.work / "scratch").mkdir(parents=True)

    def run(self, fault: Fault | None = None, at: int = -1) -> tuple[int, str]:
        """The exit code, and what was written to stderr; with a fault and no point its calls are counted."""
        said = self.work.parent / "said"
        child = os.fork()
        if child == 0:
            from monograph.__main__ import run

            to = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(to, 1)
            os.dup2(to, 2)
            if fault is not None:
                self.layer.fail_with(fault.code)
                self.layer.fail_call(fault.call.encode(), ctypes.c_long(at), ctypes.c_long(at))
            code = run(self.arguments)
            sys.stderr.flush()
            if fault is not None and at < 0:
                calls = self.layer.fail_call(b"", ctypes.c_long(-1), ctypes.c_long(-1))
                (self.work.parent / "count").write_text(str(calls))
            os._exit(int(code))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said.read_text()

    def after(self, fault: Fault, at: int) -> tuple[int, str]:
        self.reset()
        code, said = self.run(fault, at)
        if code not in ({0} if fault.harmless else {0, *CODES}) or "Traceback" in said:
            return code, f"exit code {code}: {said[-600:]}"
        if code == 0:
            return code, "" if self.state(self.work) == self.new else "is not what it would have been"
        if not any(str(self.work) in line for line in said.splitlines()):
            return code, f"no line names the path: {said[-300:]}"
        again, said = self.run()
        if again != 0 or self.state(self.work) != self.new:
            return code, f"run again: {again}: {said[-600:]}"
        return code, ""

    def sweep(self, fault: Fault, points: int) -> dict[str, Any]:
        self.reset()
        assert self.run(fault)[0] == 0
        calls = int((self.work.parent / "count").read_text())
        chosen = sorted({calls * i // points for i in range(points)}) if calls > points else range(calls)
        exits: Counter[int] = Counter()
        losses = []
        for at in chosen:
            code, wrong = self.after(fault, at)
            exits[code] += 1
            if wrong:
                losses.append({"at": at, "what": wrong.replace(str(self.work), "WORK")})
        counted = {str(code): count for code, count in sorted(exits.items())}
        named = {"call": fault.call, "fault": fault.said, "calls": calls, "points": len(chosen)}
        return named | {"exits": counted, "losses": losses}


def trained(work: pathlib.Path) -> Any:
    """Losses and the bytes of the adapter; each checkpoint that is there is read whole."""
    from safetensors.torch import load_file

    for file in work.glob("out/checkpoint-*/*.safetensors"):
        load_file(file)
    lines = (work / "out" / "metrics.jsonl").read_text().splitlines()
    rows = [(row["step"], row["loss"]) for row in map(json.loads, lines) if "loss" in row]
    return (
        rows,
        (work / "out" / "adapter_model.safetensors").read_bytes(),
        sorted(os.listdir(work / "scratch")),
    )


def prepared(work: pathlib.Path) -> Any:
    """Every prepared row, and what else lies there."""
    from datasets import load_from_disk

    folders = sorted({path.parent for path in (work / "prepared").rglob("state.json")})
    assert folders
    return [load_from_disk(str(folder)).to_dict() for folder in folders]


def jobs(root: pathlib.Path) -> Iterator[tuple[str, list[str], Callable[[pathlib.Path], Any]]]:
    import yaml

    from support.recipe_files import make_instruction_world, small_recipe

    world, work = make_instruction_world(root / "world"), root / "work"
    keys = {"output_dir": str(work / "out"), "max_steps": 4, "save_steps": 2, "step_mode": "eager"}
    keys |= {"auto_resume_from_checkpoints": True, "dataset_prepared_path": str(root / "prepared")}
    spilled = {"gradient_checkpointing": "offload_disk", "offload_folder": str(work / "scratch")}
    changes: dict[str, dict[str, Any]] = {
        "preprocess": {"dataset_prepared_path": str(work / "prepared")},
        "train": {},
        "train (spilled)": spilled,
    }
    for name, change in changes.items():
        recipe = root / f"{name.split()[0]}-{len(change)}.yml"
        recipe.write_text(yaml.safe_dump(small_recipe(world, "instruction") | keys | change))
        yield name, [name.split()[0], str(recipe)], prepared if name == "preprocess" else trained


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--points", type=int, default=4, help="points of a fault at most")
    parser.add_argument("--only", help="one command")
    parser.add_argument("--folder", type=pathlib.Path, help="where to work; a temporary folder by itself")
    chosen = parser.parse_args()
    if chosen.folder is None:
        # The layer is told the folder before it is loaded.
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder).resolve()
            environment = failing("") | {"FAIL_UNDER": str(root / "work"), "OMP_NUM_THREADS": "1"}
            command = [
                sys.executable,
                "-m",
                "support.disk_faults_python",
                *sys.argv[1:],
                "--folder",
                str(root),
            ]
            return os.spawnve(os.P_WAIT, sys.executable, command, environment)
    lost = 0
    for name, arguments, state in jobs(chosen.folder):
        if chosen.only not in (None, name):
            continue
        job = Sweep(chosen.folder / "work", arguments, state)
        for fault in CHOSEN:
            row = {"command": name} | job.sweep(fault, chosen.points)
            lost += len(row["losses"])
            print(json.dumps(row) if chosen.json else row, flush=True)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
