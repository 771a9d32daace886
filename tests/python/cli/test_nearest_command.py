"""A command that does not exist, or none at all: what to write instead is said."""

import pytest

from monograph.__main__ import ELSEWHERE, main
from monograph.cli import native


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("tarin", "train"),
        ("--train", "train"),
        ("merge-lora", "merge"),
        ("merge_lora", "merge"),
        ("inference", "generate"),
        ("exmaple", "example"),
        ("quantise", "quantize"),
        ("doktor", "doctor"),
    ],
)
def test_the_nearest_command_is_named(written, meant, capsys):
    assert main([written]) == 2
    said = capsys.readouterr().err
    assert f"unknown command {written!r}; did you mean {meant!r}? expected one of example" in said


def test_a_word_like_no_other_has_no_nearest(capsys):
    assert main(["xyzzy"]) == 2
    assert "unknown command 'xyzzy'; expected one of example" in capsys.readouterr().err


def test_no_command_says_where_to_begin(capsys):
    assert main([]) == 2
    assert "begin with `python -m monograph example FOLDER`" in capsys.readouterr().err


def test_other_names_lead_to_commands():
    from monograph.__main__ import COMMANDS

    assert set(ELSEWHERE.values()) <= {*COMMANDS, *native.COMMANDS}
    assert not set(ELSEWHERE) & {*COMMANDS, *native.COMMANDS}
