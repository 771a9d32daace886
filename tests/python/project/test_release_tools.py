"""The tools of a release: libraries to link against, the bill of materials."""

import json
import re
import subprocess
import sys
import zipfile

import pytest

from support.native_tool import ROOT

sys.path.insert(0, str(ROOT / "tools" / "release"))

import bill_of_materials
import link_stubs

pytestmark = pytest.mark.slow
PROGRAM = r"""
#include <cstdio>
#include <filesystem>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
int at_start = std::filesystem::exists("/proc") ? 41 : 0;  // a constructor before main, and a call of stat
void thrown_elsewhere();
int main() {
  int sum = at_start;
  std::thread([&] { ++sum; }).join();
  std::random_device seed;
  std::stringstream text;
  text << sum << (seed() == seed() && seed() == seed());
  try {
    thrown_elsewhere();
  } catch (const std::invalid_argument& error) {
    std::printf("%s %s\n", text.str().c_str(), error.what());
  }
}
"""
LIBRARY = r"""
#include <sstream>
#include <stdexcept>
#include <string>
void thrown_elsewhere() {
  std::stringstream text;
  text << "found " << 63;
  throw std::invalid_argument(text.str());
}
"""


def versions(path):
    listing = subprocess.run(
        ["readelf", "--version-info", "--wide", path], check=True, capture_output=True, text=True
    )
    return set(re.findall(r"Name: (\w+_[0-9.]+)", listing.stdout))


def test_of_each_name_the_newest_that_the_policy_has():
    line = "  7: 0000000000041c40    90 {} DEFAULT   15 {}\n"
    function, data = "FUNC    GLOBAL", "OBJECT  WEAK  "
    listing = line.format(function, "log@@GLIBC_2.29") + line.format(function, "log@GLIBC_2.2.5")
    listing += line.format(data, "environ@@GLIBC_2.2.5") + line.format(function, "arc4random@@GLIBC_2.36")
    listing += line.format(function, "memcpy@GLIBC_2.2.5") + line.format(function, "memcpy@@GLIBC_2.14")
    listing += line.format(function, "_dl_find_object@@GLIBC_PRIVATE")
    found = {symbol.name: (symbol.version, symbol.is_object) for symbol in link_stubs.oldest_enough(listing)}
    assert found == {
        "environ": ("GLIBC_2.2.5", True),
        "log": ("GLIBC_2.2.5", False),
        "memcpy": ("GLIBC_2.14", False),
    }


@pytest.fixture(scope="module")
def linked(tmp_path_factory):
    """A library and a program, linked as the operators and the tool are; its host is an ordinary program."""
    folder = tmp_path_factory.mktemp("linked")
    link_stubs.write_stubs(folder / "stubs")
    (folder / "program.cpp").write_text(PROGRAM)
    (folder / "library.cpp").write_text(LIBRARY)
    compiler = ["g++", "-std=c++20", "-O1", "-fPIC"]
    old = [f"-L{folder}/stubs", "-Wl,--exclude-libs,ALL"]

    def link(*words):
        subprocess.run([*compiler, *words], check=True, cwd=folder)

    link("-shared", "library.cpp", "-o", "libold.so", *old)
    link("program.cpp", "./libold.so", "-Wl,-rpath,.", "-o", "host")
    link("program.cpp", "library.cpp", "-static-libstdc++", "-o", "old_program", *old)
    return folder


def test_what_is_linked_asks_for_no_newer_library(linked):
    for name in ("libold.so", "old_program"):
        asked = versions(linked / name)
        assert any(version.startswith("GLIBC_") for version in asked)
        for version in asked:
            family, _, number = version.partition("_")
            assert tuple(map(int, number.split("."))) <= link_stubs.NEWEST[family], (
                f"{name} asks for {version}"
            )
    needed = subprocess.run(
        ["readelf", "-d", linked / "old_program"], check=True, capture_output=True, text=True
    )
    assert "[libpthread.so.0]" in needed.stdout  # before 2.34 threads were not in libc
    assert "GLIBC_2.34" in versions(linked / "host")  # the machine's own is newer: the stubs were needed


def test_an_exception_of_such_a_library_is_caught_by_its_type(linked):
    done = subprocess.run(["./host"], cwd=linked, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "420 found 63\n")


def test_such_a_program_runs_its_constructors(linked):
    done = subprocess.run(["./old_program"], cwd=linked, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "420 found 63\n")


def test_the_bill_of_materials_names_the_wheel_and_its_parts(tmp_path, monkeypatch):
    wheel = tmp_path / "monograph-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            "monograph-1.2.3.dist-info/METADATA",
            "Name: monograph\nVersion: 1.2.3\nLicense-Expression: Apache-2.0\nRequires-Dist: torch>=2.11\n"
            'Requires-Dist: peft>=0.21; extra == "train"\n',
        )
    texts = []
    for out in (tmp_path / "one.json", tmp_path / "two.json"):
        monkeypatch.setattr(sys, "argv", ["bill", str(wheel), str(out)])
        bill_of_materials.main()
        texts.append(out.read_text())
    assert texts[0] == texts[1]
    found = json.loads(texts[0])
    said = subprocess.run(["sha256sum", wheel], check=True, capture_output=True, text=True).stdout
    digest = said.split()[0]
    assert found["metadata"]["component"]["hashes"] == [{"alg": "SHA-256", "content": digest}]
    scopes = {part["name"]: part.get("scope") for part in found["components"]}
    assert scopes == {
        "CLI11": None,
        "xxHash": None,
        "libstdc++": None,
        "torch": "required",
        "peft": "optional",
    }
