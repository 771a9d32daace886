"""What a person sees of every command: the bar, colours, --quiet, --json, the last line, mistyped options."""

import fcntl
import json
import os
import pty
import re
import struct
import termios

import pytest

from monograph.__main__ import COMMANDS, main
from monograph.recipe.run.progress import Reporter
from support.native_tool import run
from support.tiny_models import tiny_llama

pytestmark = pytest.mark.slow
NATIVE = [
    ["inspect"], ["quantize"], ["dequantize"], ["merge"], ["export"], ["adapter", "check"],
    ["adapter", "convert"], ["verify"], ["diff"],
]  # fmt: skip
COLOUR = re.compile(r"\x1b\[([0-9;]*;)?(3[0-8]|9[0-7])(;[0-9;]*)?m")


def on_terminal(columns, work, environment):
    """What `work` writes to a terminal of so many columns, in a child."""
    child, terminal = pty.fork()
    if child == 0:
        for name in ("NO_COLOR", "COLUMNS"):
            os.environ.pop(name, None)
        os.environ.update({"TERM": "xterm-256color", **environment})
        fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        try:
            work()
        finally:
            os._exit(0)
    said = b""
    while True:
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # the child has closed it
            break
        if not piece:
            break
        said += piece
    os.waitpid(child, 0)
    os.close(terminal)
    return said.decode()


def steps():
    from rich.console import Console

    console = Console(file=os.fdopen(os.dup(2), "w"))  # pytest has put a file in the place of sys.stderr
    with Reporter(10_000, 0, console) as reporter:
        for _ in range(5):
            reporter.step(1.2345, 12_345, 0.98, 12.3)
        reporter._bar.refresh()


@pytest.mark.parametrize("columns", [80, 120])
def test_the_bar_fits_a_terminal(columns):
    said = on_terminal(columns, steps, {})
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said).replace("\r", "\n").splitlines()
    assert lines
    assert max(map(len, lines)) <= columns
    last = [line for line in lines if "5/10000" in line][-1]
    assert re.search(r"[━╸╺]{10}", last)
    for wanted in (r"loss 1\.2345", r"[0-9,]+ tokens/s", r"\d+:\d\d:\d\d left"):
        assert re.search(wanted, last), last


def test_colours_are_left_out_on_request():
    assert COLOUR.search(on_terminal(80, steps, {}))
    assert not COLOUR.search(on_terminal(80, steps, {"NO_COLOR": "1"}))


@pytest.mark.parametrize("command", [*COMMANDS])
def test_every_python_command_has_quiet_and_json(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "--quiet" in said
    assert "--json" in said


@pytest.mark.parametrize("command", NATIVE, ids=" ".join)
def test_every_native_command_has_quiet_and_json(command):
    said = run(*command, "--help").stdout
    assert "--quiet" in said
    assert "--json" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["estimate", "x", "--tokns", "8"], "unknown option '--tokns'; did you mean '--tokens'?"),
        (["example", "--quite", "x"], "unknown option '--quite'; did you mean '--quiet'?"),
        (["example", "x", "y"], "unexpected argument 'y'"),
        (["doctor", "--device", "cuda", "--josn"], "unknown option '--josn'; did you mean '--json'?"),
    ],
)
def test_a_mistyped_option_has_a_hint(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert said in told
    assert len(told.splitlines()) == 1


def last_lines(capsys, *words):
    assert main(list(words)) == 0
    captured = capsys.readouterr()
    return captured.out.splitlines(), captured.err.splitlines()


def test_the_way_from_example_to_merge_is_told(tmp_path, capsys, monkeypatch):
    """Each command names the next; --quiet and --json leave that line out."""
    monkeypatch.chdir(tmp_path)
    out, err = last_lines(capsys, "example", "tiny")
    assert out == ["wrote tiny: a small model, data and recipe.yml"]
    assert err[-1] == "Next: python -m monograph train tiny/recipe.yml"
    out, err = last_lines(capsys, "preprocess", "tiny/recipe.yml")
    assert out[-1].startswith("prepared in ")
    assert err[-1] == "Next: python -m monograph train tiny/recipe.yml"
    out, err = last_lines(capsys, "train", "tiny/recipe.yml", "--max-steps", "2")
    assert any(line.startswith("adapter in tiny/out; losses in ") for line in err)
    merge = "python -m monograph merge tiny/out"
    assert err[-1] == f"Next: python -m monograph generate tiny/out --prompt ...; {merge}"
    out, err = last_lines(capsys, "train", "tiny/recipe.yml", "--max-steps", "2", "--quiet", "--json")
    assert [line for line in err if "step" in line or "Next" in line] == []
    wanted = {"schema_version": 1, "output_dir": "tiny/out", "step": 2, "total": 2, "signal": None}
    found = json.loads("\n".join(out))
    assert {key: found[key] for key in wanted} == wanted
    ask = ("generate", "tiny/out", "--prompt", "cod", "--max-new-tokens", "2")
    text = "\n".join(last_lines(capsys, *ask)[0])
    out, err = last_lines(capsys, *ask, "--json")
    assert json.loads("\n".join(out)) == {"schema_version": 1, "prompt": "cod", "text": text}
    assert not [line for line in err if line.startswith("Next")]


def test_native_commands_tell_the_next_one(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model")
    done = run("quantize", tmp_path / "model", tmp_path / "packed")
    assert f"wrote 1 file to {tmp_path / 'packed'}" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("Next: train it with base_model: ")
    for silent in ("--quiet", "--json"):
        assert "Next" not in run("verify", tmp_path / "packed", silent).stderr
    done = run("verify", tmp_path / "packed", "--write-manifest", tmp_path / "manifest.json")
    assert done.stdout.splitlines()[-1] == f"wrote {tmp_path / 'manifest.json'}"
    assert done.stderr.splitlines()[-1].endswith(f"--check {tmp_path / 'manifest.json'}")
