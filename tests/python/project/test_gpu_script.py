"""tools/gpu/self_test.sh: what it calls and in which order, by stand-ins for python3 and the compiler; that
its versions and options are those of the project, and that page and stage call it."""

import os
import re
import shutil
import subprocess

import pytest

from monograph.upstream.tested_versions import PROVIDERS
from support.native_tool import ROOT

NAME = "tools/gpu/self_test.sh"
TEXT = (ROOT / NAME).read_text()
PAGE = (ROOT / "docs" / "explain" / "gpu.md").read_text()

# It writes what it is called with, makes the environment, and is the Python in it.
PYTHON = """#!/bin/bash
echo "$*" >>"$CALLS"
case $* in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *sysconfig*) echo /include ;;
  *get_device_capability*) echo "$CARD" ;;
  *"doctor --device"*) exit "$FAILED" ;;
esac
"""
COMPILER = '#!/bin/bash\nread -r line\n[[ $line != *"$MISSING"* ]]\n'


@pytest.fixture
def run(tmp_path):
    (tmp_path / "tools" / "gpu").mkdir(parents=True)
    shutil.copy(ROOT / NAME, tmp_path / NAME)
    (tmp_path / "bin").mkdir()
    for name, text in (("python3", PYTHON), ("g++", COMPILER)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    calls = tmp_path / "calls"

    def start(*arguments, card="", failed=0, missing="nothing"):
        calls.write_text("")
        env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CALLS": str(calls), "CARD": card}
        env |= {"FAILED": str(failed), "MISSING": missing}
        done = subprocess.run(
            [tmp_path / NAME, *arguments], cwd="/", env=env, capture_output=True, text=True, timeout=60
        )
        return done, calls.read_text().splitlines()

    return start


def test_it_prepares_everything_and_then_runs_the_self_test(run):
    done, calls = run("--index-url", "somewhere", card="90")
    assert done.returncode == 0, done.stderr
    found = [call for call in calls if not call.startswith("-c ")]
    assert found[0] == "-m venv build/gpu/python"
    assert found[1] == "-m pip install -q torch==2.13.0 --index-url somewhere"
    built = found[-3].split()
    assert built[:4] == ["-m", "pip", "install", "-q"]
    assert built[-1] == ".[train]"
    assert "--config-settings=cmake.define.MONOGRAPH_BUILD_CUDA=ON" in built
    assert "--config-settings=cmake.define.MONOGRAPH_CUDA_ARCHITECTURES=90" in built
    assert found[-2:] == [
        "-m monograph doctor --device cuda --out build/gpu/report.json",
        "-m monograph doctor --verify build/gpu/report.json",
    ]
    assert re.search(r"^prepared in \d+ s$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "installed"),
    [
        ([], "torch==2.13.0"),
        (["torch==2.13.1"], "torch==2.13.1"),
        (["--index-url", "place/torch", "torch"], "--index-url place/torch torch"),
        (["--index-url", "place/torch"], "torch==2.13.0 --index-url place/torch"),
        (["/tmp/torch-2.13.0.whl"], "/tmp/torch-2.13.0.whl"),
    ],
)
def test_its_arguments_are_those_of_pip_for_torch(run, arguments, installed):
    done, calls = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert f"-m pip install -q {installed}" in calls


@pytest.mark.parametrize(("card", "code"), [("86", "86"), ("87", "80"), ("75", "80"), ("", "80")])
def test_code_is_compiled_for_the_card_or_as_ptx(run, card, code):
    _, calls = run(card=card)
    assert any(f"MONOGRAPH_CUDA_ARCHITECTURES={code} " in call for call in calls)


def test_a_failed_test_is_its_exit_code_and_the_report_is_verified_all_the_same(run):
    done, calls = run(failed=1)
    assert done.returncode == 1
    assert calls[-1].startswith("-m monograph doctor --verify")


@pytest.mark.parametrize(("missing", "package"), [("xxhash.h", "libxxhash-dev"), ("Python.h", "python3-dev")])
def test_what_pip_does_not_bring_is_named_before_anything_is_installed(run, missing, package):
    done, calls = run(missing=missing)
    assert done.returncode == 5
    assert f"no {missing}" in done.stderr
    assert f"(Debian: {package})" in done.stderr
    assert not [call for call in calls if "pip" in call or "venv" in call]


def test_help_says_how_to_call_it_and_does_nothing(run):
    done, calls = run("--help")
    assert (done.returncode, calls) == (0, [])
    assert f"{NAME} --index-url URL" in done.stdout


def test_versions_and_architectures_are_those_of_the_project():
    pinned = dict(re.findall(r'"([\w-]+)==([\d.]+)"', TEXT))
    elsewhere = (ROOT / ".ci" / "install").read_text() + (ROOT / "pyproject.toml").read_text()
    known = dict(re.findall(r'"([\w-]+)==([\d.]+)"', elsewhere))
    fla = pinned.pop("fla-core")
    assert tuple(map(int, fla.split(".")[:2])) == PROVIDERS["fla-core"][0]
    assert len(pinned) >= 6
    assert pinned == {name: known[name] for name in pinned}
    cmake = (ROOT / "ops" / "cuda" / "CMakeLists.txt").read_text()
    (own,) = re.findall(r"set\(MONOGRAPH_CUDA_ARCHITECTURES ([\d ]+) CACHE", cmake)
    (script,) = re.findall(r"case \$card in ([\d |]+)\) ;;", TEXT)
    assert script.split(" | ") == own.split()
    options = (ROOT / "CMakeLists.txt").read_text() + cmake
    for name in re.findall(r"cmake\.define\.(\w+)", TEXT):
        assert re.search(rf"(option|set)\({name} ", options), name


def test_the_page_and_the_stage_call_it():
    stage = (ROOT / ".ci" / "release.sh").read_text().partition("\ngpu() {\n")[2].partition("\n}\n")[0]
    assert NAME in stage
    assert "pip install" not in stage
    section = PAGE.partition("## If you own a card")[2].partition("\n## ")[0]
    assert NAME in section
    for package in re.findall(r"\(Debian: ([\w+-]+)\)", TEXT):
        assert f"`{package}`" in section, package
    assert not re.search(r"https?://", TEXT)
    assert os.access(ROOT / NAME, os.X_OK)
