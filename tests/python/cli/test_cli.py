"""The frame of the native tool: help, exit codes, completion, man page, handing over to Python."""

import os
import shutil
import subprocess
import sys
import sysconfig

import pytest

from monograph.__main__ import main
from monograph.cli.native import find_program
from support.native_tool import ROOT, program, run

pytestmark = pytest.mark.slow
COMMANDS = [
    "inspect", "quantize", "dequantize", "convert", "merge", "export", "finetune", "adapter", "verify",
    "diff", "completion", "man",
]  # fmt: skip
PYTHON_COMMANDS = ["example", "preprocess", "train", "sweep-report", "generate", "doctor", "estimate"]


def test_needs_no_library_but_that_of_the_system():
    listed = subprocess.run(["ldd", program()], capture_output=True, text=True, check=True).stdout
    names = {line.split()[0].rsplit("/", 1)[-1] for line in listed.splitlines()}
    known = ("linux-vdso", "libc.so", "libm.so", "ld-linux", "libpthread", "libgcc_s", "libdl")
    assert all(name.startswith(known) for name in names), names


def test_help_lists_every_command_and_exit_code():
    text = run("--help").stdout
    for name in COMMANDS + PYTHON_COMMANDS:
        assert f"\n  {name} " in text
    for code in ("0", "1", "2", "3", "4", "5", "130"):
        assert f"\n  {code} " in text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_has_examples(command):
    text = run(command, "--help").stdout
    assert f"\n  monograph {command}" in text.split("\nExamples:")[1]
    assert "--quiet" in text


@pytest.mark.parametrize("command", ["check", "convert"])
def test_help_of_subcommands_is_in_help_man_page_and_completions(command):
    text = run("adapter", command, "--help").stdout
    assert f"Examples:\n  monograph adapter {command}" in text
    assert f"\n  {command} " in run("adapter", "--help").stdout
    assert f".SH MONOGRAPH adapter {command}\n" in run("man").stdout
    for shell in ("bash", "zsh", "fish"):
        assert "max-rank" in run("completion", shell).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a command is wanted, such as 'monograph train RECIPE.yml'"),
        (["conjure"], "unknown command 'conjure'; monograph --help"),
        (["mrege"], "did you mean 'monograph merge'?"),
        (["quant"], "did you mean 'monograph quantize'?"),
        (["my.yml"], "did you mean 'monograph train my.yml'?"),
        (["man", "--loud"], "--loud"),
        (["completion", "csh"], "csh"),
        (["completion"], "shell is required; monograph completion --help"),
        (["inspect", "--jsn"], "unknown option '--jsn'; did you mean '--json'? monograph inspect --help"),
        (["merge", "x", "--adpter=y"], "unknown option '--adpter'; did you mean '--adapter'?"),
        (["adapter", "chek"], "unknown command 'chek'; did you mean 'check'? monograph adapter --help"),
        (["adapter"], "subcommand is required"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(arguments, message):
    assert message in run(*arguments, code=2).stderr


def test_completion_scripts_are_accepted_by_their_shells_and_know_every_option(tmp_path):
    for shell in ("bash", "zsh", "fish"):
        text = run("completion", shell).stdout
        for name in COMMANDS + PYTHON_COMMANDS:
            assert name in text
        assert "quiet" in text
        script = tmp_path / shell
        script.write_text(text)
        if shutil.which(shell):
            subprocess.run([shell, "-n", script], check=True)


def test_bash_completes_commands_and_options():
    script = run("completion", "bash").stdout
    ask = 'COMP_WORDS=(monograph "$1" "$2"); COMP_CWORD=$3; _monograph; printf "%s\\n" "${COMPREPLY[@]}"'

    def complete(first, second, position):
        done = subprocess.run(
            ["bash", "-c", script + ask, "bash", first, second, str(position)],
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.split()

    assert complete("comp", "", 1) == ["completion"]
    assert "--quiet" in complete("completion", "--q", 2)
    assert complete("adapter", "c", 2) == ["check", "convert"]


def test_man_page_is_roff_without_warnings():
    text = run("man").stdout
    assert text.startswith(".TH MONOGRAPH 1")
    if shutil.which("groff"):
        done = subprocess.run(
            ["groff", "-man", "-Tascii", "-ww"], input=text, capture_output=True, text=True, check=True
        )
        assert not done.stderr


def test_python_commands_are_handed_over_with_their_arguments(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nexit 7\n')
    python.chmod(0o755)
    environment = dict(os.environ, MONOGRAPH_PYTHON=str(python))
    done = run("train", "a b.yml", "--rank", "8", code=7, env=environment)
    assert done.stdout.splitlines() == ["-m", "monograph", "train", "a b.yml", "--rank", "8"]


def test_generate_is_pythons_unless_it_says_native(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    environment = dict(os.environ, MONOGRAPH_PYTHON=str(python))
    for arguments in (["generate", "out"], ["generate", "--help"], ["generate"]):
        assert run(*arguments, env=environment).stdout.splitlines() == ["-m", "monograph", *arguments]
    assert "--prompt-ids" in run("generate", "--native", "--help", env=environment).stdout
    # The tool of a wheel of its own has no Python beside it.
    assert "--prompt-ids" in run("generate", "--help", name="monograph-tool").stdout
    assert "--native is required" in run("generate", "x", name="monograph-tool", code=2).stderr
    command = [sys.executable, "-m", "monograph", "generate", "--native", "x", "--tokens", "1"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**environment, "MONOGRAPH_TOOL": program()}
    )
    assert done.returncode == 5
    assert "x/config.json" in done.stderr


def test_without_python_the_message_says_so():
    message = run("train", "x.yml", code=5, env={"PATH": "/nowhere"}).stderr
    assert "'train' is done by the Python package" in message
    assert "MONOGRAPH_PYTHON" in message


def listed(text: str) -> dict[str, str]:
    """Command and summary of each line of a help page that shows one."""
    rows = (line.strip().split(None, 1) for line in text.splitlines() if line.startswith("  "))
    wanted = {*COMMANDS, *PYTHON_COMMANDS}
    return {row[0]: row[1].removesuffix(" (Python)") for row in rows if len(row) == 2 and row[0] in wanted}


def test_both_names_list_the_same_commands_with_the_same_words(capsys):
    native = listed(run("--help").stdout)
    assert sorted(native) == sorted(COMMANDS + PYTHON_COMMANDS)
    assert main(["--help"]) == 0
    assert listed(capsys.readouterr().out) == native


def test_python_hands_native_commands_over_with_arguments_output_and_exit_code():
    command = [sys.executable, "-m", "monograph", "inspect", "no such folder"]
    environment = dict(os.environ, MONOGRAPH_TOOL=str(program()))
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 5
    assert done.stderr == run("inspect", "no such folder", code=5).stderr


def test_python_finds_the_program_beside_itself_then_on_the_path(tmp_path, monkeypatch):
    monkeypatch.delenv("MONOGRAPH_TOOL", raising=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path / "nowhere"))
    for folder in ("beside", "path"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "monograph").write_text("")
        (tmp_path / folder / "monograph").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "beside" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert find_program() == str(tmp_path / "beside" / "monograph")
    (tmp_path / "beside" / "monograph").unlink()
    assert find_program() == str(tmp_path / "path" / "monograph")


def test_python_without_the_native_program_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MONOGRAPH_TOOL", str(tmp_path / "gone"))
    assert main(["inspect", "x"]) == 5
    message = capsys.readouterr().err
    assert "'inspect' is done by the native program" in message
    assert "gone cannot be run: No such file or directory" in message


@pytest.mark.long
def test_the_native_program_makes_the_example(tmp_path):
    environment = dict(os.environ, MONOGRAPH_PYTHON=sys.executable)
    done = run("example", tmp_path / "tiny", env=environment)
    assert done.stdout == f"wrote {tmp_path}/tiny: a small model, data and recipe.yml\n"
    assert f"Next: python -m monograph train {tmp_path}/tiny/recipe.yml\n" in done.stderr
    assert (tmp_path / "tiny" / "recipe.yml").exists()


def test_a_full_disk_under_stdout_is_exit_code_5():
    with open("/dev/full", "w") as full:
        done = subprocess.run([program(), "man"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 5
    assert "No space left" in done.stderr


def test_the_page_shows_the_help_of_every_command():
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    for name in COMMANDS:
        assert f"$ monograph {name} --help\n" in page
    assert "$ monograph generate --native --help\n" in page
    subprocess.run([sys.executable, ROOT / "tools/update_cli_page.py", "--check", program()], check=True)
