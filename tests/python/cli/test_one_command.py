"""`monograph COMMAND` and `python -m monograph COMMAND` are one command: who does it, and how it ends."""

import os
import subprocess
import sys

import pytest

from monograph import __main__ as command_line
from monograph.cli import exit_codes, merge
from support.native_tool import ROOT, program, run

# The arguments of merge, and whether Python does it.
MERGES = {
    "recipe": (["c.yml"], True),
    "yaml and options": (["c.yaml", "--to", "bf16"], True),
    "a folder that remembers": (["remembers"], True),
    "a folder that remembers, as a base": (["remembers", "--adapter", "a"], False),
    "the same with =": (["remembers", "--adapter=a", "--out", "o"], False),
    "a recipe and an adapter": (["c.yml", "--adapter", "a"], True),
    "a base": (["base", "--adapter", "a"], False),
    "nothing": ([], False),
}


@pytest.mark.parametrize("case", MERGES)
def test_both_agree_on_who_merges(tmp_path, monkeypatch, case):
    arguments, by_python = MERGES[case]
    (tmp_path / "remembers").mkdir()
    (tmp_path / "remembers" / "recipe.yml").write_text("")
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    assert merge.names_a_recipe(arguments) == by_python
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho handed over: "$@"\n')
    python.chmod(0o755)
    environment = os.environ | {"MONOGRAPH_PYTHON": str(python)}
    done = subprocess.run([program(), "merge", *arguments], capture_output=True, text=True, env=environment)
    handed = f"handed over: -m monograph merge {' '.join(arguments)}\n"
    assert (done.stdout == handed) == by_python, done
    if not by_python:
        assert done.returncode in (2, 3, 5)


@pytest.mark.parametrize("arguments", [["base"], [], ["--adapter", "a"]])
def test_what_merge_lacks_is_said_in_one_line(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    done = run("merge", *arguments, code=2)
    assert len(done.stderr.strip().splitlines()) == 1
    assert "CONFIG.yml" in done.stderr
    environment = os.environ | {"MONOGRAPH_TOOL": str(program())}
    words = [sys.executable, "-m", "monograph", "merge", *arguments]
    other = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert (other.returncode, other.stderr.splitlines()[-1:]) == (2, done.stderr.splitlines())


def test_one_table_of_exit_codes():
    assert exit_codes.table() in run("--help").stdout
    assert exit_codes.table() in command_line.usage()
    assert exit_codes.table() in (ROOT / "docs" / "reference" / "cli.md").read_text()


def test_a_mistake_that_nobody_expected_is_no_finding(monkeypatch, capsys):
    def broken(arguments):
        raise ZeroDivisionError("of our own")

    monkeypatch.setattr(command_line, "main", broken)
    assert command_line.run([]) == exit_codes.ExitCode.INTERNAL == 70
    assert "ZeroDivisionError: of our own" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "monograph: out of memory\n"),
        (RuntimeError("std::bad_alloc"), "monograph: out of memory: std::bad_alloc\n"),
        (
            RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory: 7 bytes\nstack"),
            "monograph: out of memory: [enforce] DefaultCPUAllocator: can't allocate memory: 7 bytes\n",
        ),
    ],
)
def test_no_memory_is_one_line_with_a_code_of_its_own(monkeypatch, capsys, error, said):
    def broken(arguments):
        raise error

    monkeypatch.setattr(command_line, "main", broken)
    assert command_line.run([]) == exit_codes.ExitCode.MEMORY == 6
    assert capsys.readouterr().err == said
