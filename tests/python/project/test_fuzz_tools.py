"""Counting what fuzz targets execute, their seeds, and the project for OSS-Fuzz as far as it runs here."""

import json
import os
import re
import subprocess
import sys
import zipfile

import yaml

from support.native_tool import ROOT

SEEDS = ROOT / "tests" / "files" / "fuzz"
SOURCES = {path.stem.removeprefix("fuzz_") for path in (ROOT / "core").rglob("fuzz_*.cpp")}
COUNT = ROOT / "tools" / "count_fuzz.py"
TARGET = """#!/bin/sh
for word; do case $word in -artifact_prefix=*) findings=${{word#*=}}; esac; done
echo '#9 NEW cov: 3 ft: 17 corp: 2/5b'
echo 'stat::number_of_executed_units: 1234'
{then}
"""


def counted(folder, then):
    (folder / "fuzz_made_up").write_text(TARGET.format(then=then))
    (folder / "fuzz_made_up").chmod(0o755)
    command = [sys.executable, COUNT, folder, "--seconds", "1", "--record", folder / "lines"]
    done = subprocess.run(command, capture_output=True, text=True)
    (SEEDS / "made_up").rmdir()
    row = json.loads((folder / "lines").read_text().splitlines()[-1])
    return done.returncode, row["executions"], row["features"], row["findings"], row["exit"]


def test_executions_are_counted_and_a_finding_fails(tmp_path):
    assert counted(tmp_path, "exit 0") == (0, 1234, 17, 0, 0)
    assert counted(tmp_path, 'touch "${findings}crash-1"; exit 77') == (1, 1234, 17, 1, 77)


def test_seeds_are_those_of_targets():
    assert {path.name for path in SEEDS.iterdir() if path.is_dir()} <= SOURCES


def test_what_was_counted_is_of_targets():
    lines = (ROOT / "bench" / "results" / "fuzz.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert {row["target"] for row in rows} <= SOURCES
    assert all(row["executions"] > 0 and row["findings"] == 0 for row in rows)


CMAKE = """#!/bin/sh
# Configured or built: the targets appear.
echo "$@" >>"$WORK/said"
mkdir -p "$WORK/build/core"
for name in header packing; do
  echo built >"$WORK/build/core/fuzz_$name"
  chmod +x "$WORK/build/core/fuzz_$name"
done
"""


def test_oss_fuzz_gets_every_target_with_its_seeds(tmp_path):
    folder = ROOT / "tools" / "oss-fuzz"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "cmake").write_text(CMAKE)
    (tmp_path / "bin" / "cmake").chmod(0o755)
    for name in ("out", "work", "src"):
        (tmp_path / name).mkdir()
    (tmp_path / "src" / "monograph").symlink_to(ROOT)
    flags = {"CXX": "clang++", "CXXFLAGS": "-O1", "LIB_FUZZING_ENGINE": "-fsanitize=fuzzer"}
    places = {name.upper(): str(tmp_path / name) for name in ("out", "work", "src")}
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    subprocess.run([folder / "build.sh"], check=True, env=os.environ | flags | places | {"PATH": path})
    said = (tmp_path / "work" / "said").read_text()
    assert "-DMONOGRAPH_FUZZ_ENGINE=-fsanitize=fuzzer" in said
    made = {file.name for file in (tmp_path / "out").iterdir()}
    seeds = "fuzz_header_seed_corpus.zip"
    assert made - {"fuzz_packing_seed_corpus.zip"} == {
        "fuzz_header", "fuzz_packing", "fuzz_header.dict", "fuzz_packing.dict", seeds
    }  # fmt: skip
    held = zipfile.ZipFile(tmp_path / "out" / seeds).namelist()
    assert len(held) == len(list((SEEDS / "header").iterdir()))


def test_the_project_of_oss_fuzz_says_what_cmake_knows():
    folder = ROOT / "tools" / "oss-fuzz"
    project = yaml.safe_load((folder / "project.yaml").read_text())
    assert project["language"] == "c++"
    assert {"address", "undefined"} <= set(project["sanitizers"])
    assert "COPY build.sh $SRC/" in (folder / "Dockerfile").read_text()
    options = (folder / "build.sh").read_text()
    known = "".join(path.read_text() for path in [ROOT / "CMakeLists.txt", *(ROOT / "cmake").glob("*.cmake")])
    for option in re.findall(r"-D(MONOGRAPH_\w+)=", options):
        assert option in known, option
