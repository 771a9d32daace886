"""Every call of the native tool that a disk or the system may refuse, refused in turn.

    PYTHONPATH=tests/python python -m support.disk_faults --json >bench/results/disk_faults.jsonl
    PYTHONPATH=tests/python python -m support.disk_faults --only quantize --points 10

A command runs once unharmed; then again for each point, with the library of failing calls preloaded. A point
is lost if the exit code is not 5 or 6, if what failed is not told in one line, if the output is neither the
whole new one nor what stood there, or if the command, run again, does not give the whole. A short write and
an interrupted one must change nothing at all. Exit code 1 if a point is lost.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from support.failing_calls import digest, failing
from support.native_tool import program, run


@dataclass(frozen=True)
class Fault:
    """`code`: an errno, or 0 for a call that transfers half; `stays`: every later call fails too."""

    call: str
    code: int
    stays: bool = False

    @property
    def said(self) -> str:
        how = "short" if self.code == 0 else errno.errorcode[self.code]
        return how + (", from then on" if self.stays else "")

    @property
    def harmless(self) -> bool:
        """Whether the command must end as if nothing had happened."""
        return self.call in ("write", "pwrite") and self.code in (0, errno.EINTR)

    def environment(self, at: int) -> dict[str, str]:
        made = failing(self.call, at, self.code)
        return (
            made
            | ({"FAIL_LAST": "1000000000"} if self.stays else {})
            | ({} if self.code else {"FAIL_SHORT": "1"})
        )


WRITES = [Fault("pwrite", code) for code in (errno.ENOSPC, errno.EIO, errno.EINTR, 0)]
WRITES += [Fault("write", code) for code in (errno.ENOSPC, errno.EIO, errno.EINTR, 0)]
FAULTS = [
    *WRITES,
    Fault("pwrite", errno.ENOSPC, stays=True),
    Fault("create", errno.EROFS),
    Fault("create", errno.EROFS, stays=True),
    Fault("open", errno.EIO),
    Fault("mkdir", errno.ENOSPC),
    Fault("fallocate", errno.ENOSPC),
    Fault("ftruncate", errno.EIO),
    Fault("fsync", errno.EIO),
    Fault("rename", errno.EROFS),
    Fault("renameat2", errno.EIO),
    Fault("unlink", errno.EIO),
    Fault("mmap", errno.ENOMEM),
    Fault("malloc", errno.ENOMEM),
    Fault("malloc", errno.ENOMEM, stays=True),
]
# Of the one table: no file, no memory.
CODES = {5, 6}


class Job:
    """One command, what it reads, and the state that it leaves."""

    def __init__(self, root: pathlib.Path, arguments: list[Any], output: str) -> None:
        self.root, self.output = root, root / "work" / output
        self.arguments = [str(program()), *map(str, arguments), "--quiet"]
        self.replaces = arguments[0] != "finetune"
        self.reset(with_old=False)
        done = self.run()
        assert done.returncode == 0, done.stderr
        self.new = self.state()
        assert self.new
        if self.replaces:
            self.arguments.append("--force")

    def state(self) -> dict[str, str]:
        """Digests of what was written but hidden files; of metrics what does not tell the time."""
        if self.output.is_file():
            return digest(self.output.parent) or {}
        found = {name: value for name, value in (digest(self.output) or {}).items() if name[0] != "."}
        if (metrics := self.output / "metrics.jsonl").exists():
            rows = [json.loads(line) for line in metrics.read_text().splitlines()]
            found["metrics.jsonl"] = str([(row["step"], row["loss"], row["grad_norm"]) for row in rows])
        return found

    def reset(self, with_old: bool) -> dict[str, str]:
        shutil.rmtree(self.root / "work", ignore_errors=True)
        self.output.parent.mkdir(parents=True)
        if with_old and self.output.suffix == ".gguf":
            self.output.write_bytes(b"old")
        elif with_old:
            self.output.mkdir()
            (self.output / "config.json").write_text("{}")
            (self.output / "adapter_config.json").write_text("{}")
            (self.output / "old.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
        return self.state()

    def run(self, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.arguments, capture_output=True, text=True, timeout=300, **options)

    def count(self, call: str) -> int:
        self.reset(with_old=self.replaces)
        file = self.root / "count"
        done = self.run(env=failing(call, count=file))
        assert done.returncode == 0, done.stderr
        return int(file.read_text())

    def after(self, fault: Fault, at: int) -> tuple[int, str]:
        """The exit code, and what is wrong; empty if nothing is."""
        old = self.reset(with_old=self.replaces and at % 2 == 0)
        done = self.run(env=fault.environment(at))
        code, lines = (
            done.returncode,
            [line for line in done.stderr.splitlines() if ": warning: " not in line],
        )
        if code not in ({0} if fault.harmless else {0, *CODES}):
            return code, f"exit code {code}: {done.stderr[-300:]}"
        if code != 0 and (len(lines) != 1 or not lines[0].startswith("monograph: ")):
            return code, f"not one line: {done.stderr[-300:]}"
        found = self.state()
        if self.replaces and found != self.new and (code == 0 or found != old):
            return code, f"left {sorted(set(found) ^ set(self.new))}"
        if not self.replaces and code == 0 and found != self.new:
            return code, "is not what it would have been"
        if code != 0 and (at % 4 == 0 or not self.replaces):
            again = self.run()
            if again.returncode != 0 or self.state() != self.new:
                return code, f"run again: {again.returncode}: {again.stderr[-300:]}"
            if beside := sorted(path.name for path in self.output.parent.iterdir() if path != self.output):
                return code, f"left beside: {beside}"
        return code, ""

    def sweep(self, fault: Fault, points: int) -> dict[str, Any]:
        calls = self.count(fault.call)
        chosen = sorted({calls * i // points for i in range(points)}) if calls > points else range(calls)
        exits: Counter[int] = Counter()
        losses = []
        for at in chosen:
            code, wrong = self.after(fault, at)
            exits[code] += 1
            if wrong:
                losses.append({"at": at, "what": wrong.replace(str(self.root), "ROOT")})
        return {
            "call": fault.call,
            "fault": fault.said,
            "calls": calls,
            "points": len(chosen),
            "exits": {str(code): count for code, count in sorted(exits.items())},
            "losses": losses,
        }


def make_sources(root: pathlib.Path) -> pathlib.Path:
    """A model, packed, in words of GPTQ and as GGUF, an adapter on it, a recipe and its tokens."""
    import torch
    import yaml

    from monograph.__main__ import main
    from support.merge_reference import adapter_on
    from support.recipe_files import make_model
    from support.two_trainers import make_world, recipe
    from support.word_folders import Words, write_words

    world = make_world(root / "world")
    model = make_model(root / "again").to(torch.float32)
    adapter_on(model, root / "adapter", torch.float32, target_modules="all-linear")
    write_words(world / "model", root / "words", Words(group=32))
    run("export", world / "model", root / "base.gguf", "--to", "gguf", "--type", "q8_0")
    keys = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "auto_resume_from_checkpoints": True}
    (root / "recipe.yml").write_text(yaml.safe_dump(recipe(world, **keys)))
    assert (
        main(
            ["preprocess", str(root / "recipe.yml"), "--tokens", str(root / "tokens.safetensors"), "--quiet"]
        )
        == 0
    )
    return root


def jobs(root: pathlib.Path) -> dict[str, list[Any]]:
    """Arguments and the name of the output."""
    out, file = root / "work" / "out", root / "work" / "out.gguf"
    base, adapter = root / "world" / "model", root / "adapter"
    words = ["--for", "peft", "--another-base", "--out", out]
    merge = ["--adapter", adapter, "--warn-below", "0", "--another-base", "--jobs", "2"]
    train = ["--tokens", root / "tokens.safetensors", "--output-dir", out, "--threads", "1"]
    return {
        "quantize": ["quantize", base, out, "--double-quant", "--jobs", "2"],
        "dequantize": ["dequantize", root / "world" / "nf4", out, "--jobs", "2"],
        "merge": ["merge", base, *merge, "--base", "original", "--out", out],
        "merge (GGUF)": ["merge", root / "base.gguf", *merge, "--out", file],
        "export": ["export", base, file, "--to", "gguf", "--type", "q8_0", "--jobs", "2"],
        "convert": ["convert", root / "words", out, "--jobs", "2"],
        "adapter convert": ["adapter", "convert", base, adapter, *words],
        "finetune": ["finetune", root / "recipe.yml", *train],
    }


def sweep(root: pathlib.Path, only: str | None, points: int, faults: list[Fault]) -> Iterator[dict[str, Any]]:
    with contextlib.redirect_stdout(sys.stderr):
        make_sources(root)
    for name, arguments in jobs(root).items():
        if only not in (None, name):
            continue
        output = "out.gguf" if any(str(word).endswith("work/out.gguf") for word in arguments) else "out"
        job = Job(root, arguments, output)
        for fault in faults:
            yield {"command": name} | job.sweep(fault, points)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--only", help="one command")
    parser.add_argument("--call", help="faults of one call")
    parser.add_argument("--points", type=int, default=60, help="points of a fault at most")
    chosen = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    faults = [fault for fault in FAULTS if chosen.call in (None, fault.call)]
    lost = 0
    with tempfile.TemporaryDirectory() as folder:
        for row in sweep(pathlib.Path(folder).resolve(), chosen.only, chosen.points, faults):
            lost += len(row["losses"])
            print(json.dumps(row) if chosen.json else row, flush=True)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
