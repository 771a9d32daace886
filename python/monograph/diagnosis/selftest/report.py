"""The report of a self-test: its keys, its own checksum, and whether a report that was sent is whole.

schema_version  1
device          "cuda"; `hardware` says which card
state           "no device" | "passed" | "incomplete" (something was skipped) | "failed"
tests           [{name, result: "pass" | "fail" | "skipped", reason, seconds, figures}]
versions        of monograph, torch and what it was built for, python, peers
sha256          of the operator library of the device and of the device code in it, of the CPU's library
contents_sha256 of all the rest: tells an altered report, not who wrote it
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import math
import pathlib
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from monograph.diagnosis.selftest.device import Device
from monograph.ops import library
from monograph.upstream.tested_versions import TRIED

DEVICE_NAMES = ("cuda", "cpu")
SCHEMA_VERSION = 1
RESULTS = ("pass", "fail", "skipped")
_PEERS = ("bitsandbytes", "fla-core", "flash-attn", "peft", "transformers", "triton")
_KEYS = {
    "schema_version": int,
    "device": str,
    "state": str,
    "hardware": dict,
    "tests": list,
    "versions": dict,
    "sha256": dict,
    "contents_sha256": str,
}


def finished(device: Device, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The report of these rows."""
    report: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "device": device.name,
        "state": state_of(device.missing(), rows),
        "hardware": device.hardware(),
        "tests": [dict(row) for row in rows],
        "versions": versions(),
        "sha256": hashes(device.name),
    }
    return report | {"contents_sha256": checksum(report)}


def state_of(missing: str | None, rows: Iterable[Mapping[str, Any]]) -> str:
    results = {row["result"] for row in rows}
    if "fail" in results:
        return "failed"
    if missing:
        return "no device"
    return "incomplete" if "skipped" in results else "passed"


def versions() -> dict[str, str]:
    found = {
        "monograph": importlib.metadata.version("monograph"),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda or "none",
        "torch_hip": torch.version.hip or "none",
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    for name in _PEERS:
        if importlib.util.find_spec(name) is not None:
            found[name] = importlib.metadata.version(name)
    return found


def hashes(device: str) -> dict[str, Any]:
    """None: there is no such library. `cubins` are what the build of the library has written beside it."""
    cuda = library.library_path(library.CUDA_NAME) if device == "cuda" else None
    listed = cuda.with_suffix(".json") if cuda is not None else None
    cubins = json.loads(listed.read_text())["cubins"] if listed is not None and listed.exists() else {}
    return {
        "library": file_hash(cuda),
        "cubins": cubins,
        "cpu_library": file_hash(library.library_path()),
    }


def file_hash(path: pathlib.Path | None) -> str | None:
    if path is None or not path.exists():
        return None
    return hashlib.sha256(path.read_bytes()).hexdigest()


def checksum(report: Mapping[str, Any]) -> str:
    """Of everything but itself, in one spelling."""
    rest = {name: value for name, value in report.items() if name != "contents_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def problems(report: Any, names: Sequence[str], figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What is wrong with a report that was sent; empty if nothing is.

    names: the tests that it must have; figures: by name of a test what it must have found if it passed.
    """
    if not isinstance(report, dict):
        return [f"the report is a {type(report).__name__}, wanted an object"]
    if report.get("schema_version") != SCHEMA_VERSION or isinstance(report["schema_version"], bool):
        return [f"schema_version is {report.get('schema_version')!r}, wanted {SCHEMA_VERSION}"]
    found = [
        f"{name} is {type(report[name]).__name__}, wanted {kind.__name__}"
        if name in report
        else f"{name} is missing"
        for name, kind in _KEYS.items()
        if not isinstance(report.get(name), kind)
    ]
    found += [f"{name} is no key of a report" for name in report if name not in _KEYS]
    if found:
        return found
    if report["contents_sha256"] != checksum(report):
        found.append("contents_sha256 does not fit the contents: the report was altered")
    if report["device"] not in DEVICE_NAMES:
        found.append(f"device is {report['device'][:40]!r}, wanted one of {', '.join(DEVICE_NAMES)}")
    found += _wrong_rows(report["tests"], names, figures)
    if not found:
        missing = "none" if report["state"] == "no device" else None
        wanted = state_of(missing, report["tests"])
        if report["state"] != wanted:
            found.append(f"state is {report['state']!r}, the tests say {wanted!r}")
        found += _wrong_device(report)
        ran = [row["name"] for row in report["tests"] if row["result"] != "skipped"]
        if report["state"] == "no device" and ran:
            found.append(f"state is 'no device', but {ran[0]} was run")
    return found + _wrong_versions(report["versions"]) + _wrong_hashes(report["sha256"])


def _wrong_device(report: Mapping[str, Any]) -> list[str]:
    """What a device that passed must have told of itself."""
    if report["state"] != "passed" or report["device"] == "cpu":
        return []
    found = [] if report["hardware"].get("architecture") else ["hardware: architecture is missing"]
    return found + ([] if report["sha256"].get("library") else ["sha256: library is missing"])


def _no_numbers(figures: Any) -> bool:
    """Whether a NaN or an infinity is among them."""
    if isinstance(figures, float):
        return not math.isfinite(figures)
    if isinstance(figures, dict):
        figures = list(figures.values())
    return isinstance(figures, list) and any(_no_numbers(part) for part in figures)


def _wrong_rows(
    rows: Sequence[Any], names: Sequence[str], figures: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    if broken := [row for row in rows if not isinstance(row, dict) or not isinstance(row.get("name"), str)]:
        return [f"a test is {str(broken[0])[:60]}, wanted an object with a name"]
    given = [row["name"] for row in rows]
    found = [f"{name}: the test is missing" for name in names if name not in given]
    found += [f"{name}: no such test is known" for name in given if name not in names]
    found += [
        f"{name}: is there {given.count(name)} times" for name in sorted(set(given)) if given.count(name) > 1
    ]
    for row in rows:
        name, result = row["name"], row.get("result")
        if result not in RESULTS:
            found.append(f"{name}: result is {result!r}, wanted one of {', '.join(RESULTS)}")
        elif result != "pass" and not row.get("reason"):
            found.append(f"{name}: {result} without a reason")
        elif result == "pass" and _no_numbers(row.get("figures")):
            found.append(f"{name}: passed with figures that are not finite")
        elif result == "pass" and name in figures and row.get("figures") != dict(figures[name]):
            found.append(f"{name}: passed with other figures than those that are committed")
    return found


def _wrong_versions(given: Mapping[str, Any]) -> list[str]:
    own = importlib.metadata.version("monograph")
    found = []
    if given.get("monograph") != own:
        found.append(
            f"versions: monograph is {given.get('monograph')!r}, this one is {own}: verify it with that"
        )
    lowest, highest = TRIED["torch"]
    numbers = re.match(r"(\d+)\.(\d+)", str(given.get("torch")))
    if numbers is None or not lowest <= (int(numbers[1]), int(numbers[2])) <= highest:
        wanted = f"{lowest[0]}.{lowest[1]} to {highest[0]}.{highest[1]}"
        found.append(f"versions: torch is {given.get('torch')!r}, wanted {wanted}")
    return found + [f"versions: {name} is missing" for name in ("python", "torch_cuda") if name not in given]


def _wrong_hashes(given: Mapping[str, Any]) -> list[str]:
    listed = {"library": given.get("library"), "cpu_library": given.get("cpu_library")}
    cubins = given.get("cubins")
    if not isinstance(cubins, dict):
        return [f"sha256: cubins is {cubins!r}, wanted an object"]
    listed |= {f"cubins.{name}": value for name, value in cubins.items()}
    return [
        f"sha256: {name} is {value!r}, wanted 64 hexadecimal digits"
        for name, value in listed.items()
        if value is not None and not re.fullmatch("[0-9a-f]{64}", str(value))
    ]
