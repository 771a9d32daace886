"""A version that was never tried is said, once, where the library is first used."""

import importlib.metadata
import re
import subprocess
import sys
import warnings

import pytest

from monograph.upstream import tested_versions

FOUND = {"torch": "2.16.0", "transformers": "5.22.9", "peft": "0.20.0", "trl": "2.0.0rc1"}


def found(name):
    if name not in FOUND:
        raise importlib.metadata.PackageNotFoundError(name)
    return FOUND[name]


@pytest.fixture
def others(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", found)
    monkeypatch.setattr(tested_versions, "_WARNED", set())


@pytest.mark.parametrize(
    ("library", "message"),
    [
        ("torch", "never tried with torch 2.16.0, only with 2.11 to 2.15"),
        ("peft", "never tried with peft 0.20.0, only with 0.21"),
        ("trl", "never tried with trl 2.0.0rc1, only with 1.16"),
    ],
)
def test_a_version_outside_is_said_once(others, library, message):
    with pytest.warns(UserWarning, match=re.escape(message)):
        tested_versions.warn_if_untried(library)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tested_versions.warn_if_untried(library)


@pytest.mark.parametrize("library", ["transformers", "accelerate"])
def test_a_patch_release_and_a_missing_library_are_silent(others, library):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tested_versions.warn_if_untried(library)


def test_importing_monograph_says_it():
    code = (
        "import importlib.metadata as m; own = m.version; "
        "m.version = lambda name: '9.9.0' if name == 'torch' else own(name); import monograph"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("never tried with torch 9.9.0") == 1


def test_the_lowest_versions_are_those_of_the_package():
    import pathlib

    text = (pathlib.Path(__file__).parents[3] / "pyproject.toml").read_text()
    for library, (lowest, _) in tested_versions.TRIED.items():
        bounds = set(re.findall(rf'"{library}>=([\d.]+)', text))
        assert bounds == {".".join(map(str, lowest))}, library
