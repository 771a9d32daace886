"""How long tests take, as tests/durations.json keeps it: parts of equal time, and tests for a short time.

    {"ops/test_linear.py": {"others": 0.03, "test_a_long_one[nf4]": 4.2}}

The seconds of a test with its fixtures, if they are at least `LISTED`; those of all others of the file are
their mean. A test that is not known takes the median of the means.
"""

from __future__ import annotations

import json
import pathlib
import re
import statistics
from collections.abc import Iterable, Mapping

FILE = pathlib.Path(__file__).resolve().parents[2] / "durations.json"
LISTED = 1.0
OTHERS = "others"
Durations = dict[str, dict[str, float]]


def place(test: str) -> tuple[str, str]:
    """The file, from tests/python on, and the test in it, of an id as pytest writes it."""
    file, _, name = test.partition("::")
    return file.removeprefix("tests/python/"), name


def read(path: pathlib.Path = FILE) -> Durations:
    found: Durations = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def merged(known: Durations, measured: Mapping[str, float]) -> Durations:
    """`known` with the seconds of the tests that were measured in place of its own."""
    result = {file: dict(tests) for file, tests in known.items()}
    short: dict[str, list[float]] = {}
    for test, seconds in measured.items():
        file, name = place(test)
        tests = result.setdefault(file, {})
        tests.pop(name, None)
        if seconds >= LISTED:
            tests[name] = round(seconds, 1)
        else:
            short.setdefault(file, []).append(seconds)
    for file, all_seconds in short.items():
        result[file][OTHERS] = round(statistics.fmean(all_seconds), 3)
    return {file: dict(sorted(tests.items())) for file, tests in sorted(result.items())}


def write(path: pathlib.Path, measured: Mapping[str, float]) -> None:
    path.write_text(json.dumps(merged(read(path), measured), indent=1) + "\n", encoding="utf-8")


def part_of(written: str) -> tuple[int, int]:
    """K and N of `K/N`."""
    match = re.fullmatch(r"(\d+)/(\d+)", written)
    number, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= number <= count:
        raise ValueError(f"--part is {written}, wanted K/N with 1 <= K <= N")
    return number, count


def seconds_of(tests: Iterable[str], known: Durations) -> dict[str, float]:
    means = [found[OTHERS] for found in known.values() if OTHERS in found]
    median = statistics.median(means) if means else LISTED
    result = {}
    for test in tests:
        file, name = place(test)
        found = known.get(file, {})
        result[test] = found.get(name, found.get(OTHERS, median))
    return result


def parts(tests: Iterable[str], known: Durations, count: int) -> list[list[str]]:
    """The tests in `count` lists of about equal seconds, each in one of them, in the order given.

    A file stays whole unless it takes longer than a list should; then neighbours stay together.
    """
    seconds = seconds_of(tests, known)
    wanted = sum(seconds.values()) / count
    files: dict[str, list[str]] = {}
    for test in seconds:
        files.setdefault(place(test)[0], []).append(test)
    groups = [group for file in files.values() for group in _pieces(file, seconds, wanted)]
    weights = [0.0] * count
    chosen: list[set[str]] = [set() for _ in range(count)]
    for group in sorted(groups, key=lambda group: (-_sum(group, seconds), group[0])):
        lightest = weights.index(min(weights))
        weights[lightest] += _sum(group, seconds)
        chosen[lightest].update(group)
    return [[test for test in seconds if test in part] for part in chosen]


def within(tests: Iterable[str], known: Durations, limit: float, changed: Iterable[str]) -> list[str]:
    """Tests that take `limit` seconds together at most, in the order given.

    First those of what `changed` names, from the root of the tree on: a test file, or a source by its room;
    then the others. Of both, the quickest tests.
    """
    near = {name for path in changed for name in _near(path)}
    seconds = seconds_of(tests, known)

    def turn(test: str) -> tuple[bool, float]:
        file = place(test)[0]
        return file not in near and file.partition("/")[0] not in near, seconds[test]

    chosen, left = set[str](), limit
    for test in sorted(seconds, key=turn):
        if seconds[test] <= left:
            left -= seconds[test]
            chosen.add(test)
    return [test for test in seconds if test in chosen]


def _near(path: str) -> list[str]:
    """The test file or the rooms that a changed file belongs to."""
    if path.startswith("tests/python/"):
        return [path.removeprefix("tests/python/")]
    if path.startswith("python/monograph/"):
        return [path.split("/")[2]]
    return {"ops": ["ops"], "core": ["ops", "native"], "cli": ["native", "cli"]}.get(path.split("/")[0], [])


def _sum(tests: list[str], seconds: Mapping[str, float]) -> float:
    return sum(seconds[test] for test in tests)


def _pieces(file: list[str], seconds: Mapping[str, float], wanted: float) -> list[list[str]]:
    if _sum(file, seconds) <= wanted:
        return [file]
    pieces: list[list[str]] = [[]]
    for test in file:
        if pieces[-1] and _sum(pieces[-1], seconds) + seconds[test] > wanted:
            pieces.append([])
        pieces[-1].append(test)
    return pieces
