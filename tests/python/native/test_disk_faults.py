"""What support/disk_faults.py promises, at a few points of every command; and that it sees what is lost."""

import errno
import pathlib
import subprocess
import sys

import pytest

from support import disk_faults
from support.disk_faults import FAULTS, Fault, Job, jobs, make_sources
from support.failing_calls import failing
from support.native_tool import ROOT, program

COMMANDS = list(jobs(pathlib.Path("/nowhere")))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_sources(tmp_path_factory.mktemp("faults"))


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_lost(root, command):
    arguments = jobs(root)[command]
    job = Job(root, arguments, "out.gguf" if root / "work" / "out.gguf" in arguments else "out")
    rows = [job.sweep(fault, 2) for fault in FAULTS]
    assert [row for row in rows if row["losses"]] == []
    assert sum(row["points"] for row in rows) >= 20
    assert {code for row in rows for code in row["exits"]} == {"0", "5", "6"}
    if job.output.suffix != ".gguf" and command not in ("adapter convert", "finetune"):
        job.reset(with_old=False)
        assert job.run().returncode == 0
        verified = subprocess.run([program(), "verify", job.output], capture_output=True, text=True)
        assert verified.returncode == 0, verified.stderr


def test_no_memory_is_one_line_and_an_exit_code_of_its_own():
    """From the first allocation on, before main and inside what throws, there is none."""
    for at in (0, 1, 7, 40, 200):
        environment = failing("malloc", at, errno.ENOMEM) | {"FAIL_LAST": "1000000000"}
        done = subprocess.run(
            [program(), "inspect", "/nowhere"], capture_output=True, text=True, env=environment
        )
        assert (done.returncode, done.stderr) == (6, "monograph: out of memory\n"), at


HALF = """#!/bin/sh
# Writes two files; if it is not whole, nobody hears of it.
mkdir -p "$2" && printf a >"$2/one" && {second} printf b >"$2/two"
exit 0
"""


@pytest.mark.parametrize(
    ("second", "lost"),
    [("", ""), ("[ -z $LD_PRELOAD ] &&", "left ['two']"), ("[ -z $LD_PRELOAD ] || exit 9;", "exit code 9")],
)
def test_a_loss_is_seen(tmp_path, monkeypatch, second, lost):
    tool = tmp_path / "tool"
    tool.write_text(HALF.format(second=second))
    tool.chmod(0o755)
    monkeypatch.setattr(disk_faults, "program", lambda: tool)
    job = Job(tmp_path, ["half", tmp_path / "work" / "out"], "out")
    assert lost in job.after(Fault("fsync", errno.EIO), 1)[1]
    assert bool(job.after(Fault("fsync", errno.EIO), 1)[1]) is bool(lost)


def test_a_short_write_is_short(tmp_path):
    """The layer itself: half of the bytes, once, and only below the folder that is named."""
    script = (
        "import os, sys\n"
        "for name in sys.argv[1:]:\n"
        "    fd = os.open(name, os.O_WRONLY | os.O_CREAT)\n"
        "    print(os.write(fd, b'12345678'), os.pwrite(fd, b'12345678', 0))\n"
    )
    inside, outside = tmp_path / "in" / "file", tmp_path / "file"
    inside.parent.mkdir()
    for call, wanted in (("write", "4 8"), ("pwrite", "8 4")):
        environment = failing(call, 0) | {"FAIL_SHORT": "1", "FAIL_UNDER": str(tmp_path / "in")}
        said = subprocess.run(
            [sys.executable, "-c", script, outside, inside, inside],
            capture_output=True,
            text=True,
            env=environment,
        )
        assert said.stdout.splitlines() == ["8 8", wanted, "8 8"], said.stderr


@pytest.mark.slow
def test_preprocess_loses_nothing_and_names_the_path():
    command = [sys.executable, "-m", "support.disk_faults_python", "--only", "preprocess", "--points", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "tests" / "python", timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count("'losses': []") == 10
