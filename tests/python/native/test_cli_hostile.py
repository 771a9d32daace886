"""Every hostile file through the program: its message, exit code 3, under 1 s and 200 MB."""

import os
import pathlib
import resource
import subprocess

import pytest

from support.measured_runs import measured, measured_all
from support.native_tool import ROOT, program

# The sanitizers' build, if there is one: .ci/run asan sets it.
TOOL = os.environ.get("MONOGRAPH_TOOL")
LIMIT_SECONDS = 1.0 if TOOL is None else 20.0
LIMIT_BYTES = 200_000_000


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """(name, file, rule) of every case. The files are made once: some have 100 MB."""
    folder = tmp_path_factory.mktemp("hostile")
    maker = program("write_hostile_files", "core/monograph/safetensors")
    listed = subprocess.run([maker, folder], capture_output=True, text=True, check=True).stdout
    return [tuple(line.split("\t")) for line in listed.splitlines()]


def test_every_hostile_file_gives_its_error_and_exit_code_3(cases):
    assert len(cases) >= 150
    findings = []
    results = measured_all([[TOOL or program(), "inspect", file] for _, file, _ in cases])
    for (name, file, rule), (code, error, seconds, peak, _) in zip(cases, results, strict=True):
        if code != 3 or rule not in error or error.count("\n") != 1:
            findings.append(f"{name}: code {code}, {error!r}, wanted {rule!r}")
        if seconds > LIMIT_SECONDS:
            findings.append(f"{name}: {seconds:.2f} s")
        # Pages of the mapped file count as memory of the process too.
        mapped = sum(f.stat().st_size for f in pathlib.Path(file).parent.iterdir() if f.is_file())
        if TOOL is None and peak - mapped > LIMIT_BYTES:
            findings.append(f"{name}: {peak / 1e6:.0f} MB")
    assert not findings, "\n".join(findings)


@pytest.mark.parametrize("command", ["quantize", "dequantize", "convert", "verify", "diff"])
def test_other_commands_refuse_them_too_and_write_nothing(cases, command, tmp_path):
    # One of ten: they all open files by the same path.
    for name, file, rule in cases[:: 10 if TOOL is None else 40]:
        arguments = [] if command == "verify" else [file] if command == "diff" else [tmp_path / "out"]
        code, error, *_ = measured([TOOL or program(), command, file, *arguments])
        assert code == 3, (name, error)
        assert rule in error, name
        assert not list(tmp_path.iterdir())


def test_hostile_configs_are_refused(tmp_path):
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    for text, rule in {
        "[]": "must be a JSON object",
        '{"a": 1, "a": 2}': "duplicate key 'a'",
        "[" * 100_000: "nested too deeply",
        '{"a": [' + "0," * 2_000_000 + "0]}": "more than 250000 values",
        '{"a": "' + "x" * 20_000_000 + '"}': "at most 16000000 are allowed",
        "{": "found the end",
        '{"\xff": 1}': "not UTF-8",
    }.items():
        (folder / "config.json").write_bytes(text.encode("latin-1"))
        code, error, seconds, peak, _ = measured([TOOL or program(), "inspect", folder])
        assert (code, rule in error) == (3, True), error
        assert TOOL or peak < LIMIT_BYTES
        assert seconds < LIMIT_SECONDS
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/dev/zero")
    code, error, *_ = measured([TOOL or program(), "inspect", folder])
    assert (code, "not a regular file" in error) == (3, True), error


def test_zero_length_and_special_files(tmp_path):
    empty = tmp_path / "model.safetensors"
    empty.touch()
    assert measured([TOOL or program(), "inspect", tmp_path])[0] == 3
    empty.unlink()
    os.mkfifo(empty)
    code, error, seconds, *_ = measured([TOOL or program(), "inspect", tmp_path])
    assert (code, "not a regular file" in error, seconds < 10) == (3, True, True), error


def test_the_limits_hold_without_address_space(cases):
    """A 100 MB header is refused in the memory that is left, not by a crash."""
    name, file, _ = max(cases, key=lambda case: pathlib.Path(case[1]).stat().st_size)
    if TOOL is not None:
        pytest.skip("sanitizers need address space")
    limit = 400_000_000
    done = subprocess.run(
        [program(), "inspect", file],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert done.returncode in (3, 5), (name, done.stderr)
    assert str(ROOT) not in done.stderr
