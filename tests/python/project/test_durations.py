"""tests/durations.json; --part: parts of about equal time; --within: tests for a short time."""

import json
import random
import re
import subprocess
import sys

import pytest

from support import durations
from support.native_tool import ROOT


def drawn(files=40, seed=0):
    """Ids of tests as pytest writes them, and their seconds."""
    numbers = random.Random(seed)
    known = {
        f"ops/test_{file}.py": {"others": 0.1}
        | {f"test_{test}": numbers.uniform(1, 60) for test in range(numbers.randint(0, 3))}
        for file in range(files)
    }
    tests = [f"tests/python/{file}::test_{test}" for file in known for test in range(numbers.randint(1, 9))]
    return tests, known


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_every_test_is_in_one_part_and_parts_take_equally_long(count):
    tests, known = drawn()
    parts = durations.parts(tests, known, count)
    assert sorted(test for part in parts for test in part) == sorted(tests)
    assert parts == durations.parts(tests, known, count)
    seconds = durations.seconds_of(tests, known)
    lengths = [sum(seconds[test] for test in part) for part in parts]
    assert max(lengths) <= 1.1 * min(lengths)
    for part in parts:  # in the order given, so that fixtures of a file are made once
        assert part == [test for test in tests if test in set(part)]


def test_a_file_stays_whole_unless_it_takes_longer_than_a_part():
    tests, known = drawn()
    where = [{durations.place(test)[0] for test in part} for part in durations.parts(tests, known, 4)]
    assert not any(where[a] & where[b] for a in range(4) for b in range(a))
    one = [f"tests/python/ops/test_one.py::test_{number}" for number in range(8)]
    parts = durations.parts(one, {"ops/test_one.py": {"others": 2.0}}, 4)
    assert parts == [one[:2], one[2:4], one[4:6], one[6:]]


def test_more_parts_than_tests_leaves_some_empty():
    assert durations.parts(["a.py::test_a"], {}, 3) == [["a.py::test_a"], [], []]


def test_what_is_not_known_takes_the_median():
    known = {"a.py": {"others": 0.1}, "b.py": {"others": 0.2, "test_b": 9.0}, "c.py": {"others": 0.7}}
    tests = ["tests/python/b.py::test_b", "tests/python/b.py::test_new", "tests/python/d.py::test_d"]
    assert durations.seconds_of(tests, known) == dict(zip(tests, (9.0, 0.2, 0.2), strict=True))


def test_what_was_measured_takes_the_place_of_what_was_known(tmp_path):
    path = tmp_path / "durations.json"
    durations.write(path, {"tests/python/a.py::test_long": 5.0, "tests/python/a.py::test_short": 0.2})
    durations.write(path, {"tests/python/a.py::test_long": 0.4, "tests/python/b.py::test_other": 3.04})
    assert json.loads(path.read_text()) == {"a.py": {"others": 0.4}, "b.py": {"test_other": 3.0}}


def test_the_committed_file_names_files_that_exist():
    known = durations.read()
    assert known
    assert [file for file in known if not (ROOT / "tests" / "python" / file).exists()] == []


def within(limit, changed=()):
    tests = [
        f"tests/python/{file}::test_{name}" for file in ("nn/test_a.py", "ops/test_b.py") for name in "xyz"
    ]
    known = {
        "nn/test_a.py": {"test_x": 1.0, "test_y": 2.0, "test_z": 3.0},
        "ops/test_b.py": {"test_x": 5.0, "test_y": 4.0, "test_z": 6.0},
    }
    return [test.removeprefix("tests/python/") for test in durations.within(tests, known, limit, changed)]


def test_for_a_short_time_the_quickest_are_taken_in_the_order_given():
    assert within(0.5) == []
    assert within(6) == ["nn/test_a.py::test_x", "nn/test_a.py::test_y", "nn/test_a.py::test_z"]
    assert within(10) == [
        "nn/test_a.py::test_x",
        "nn/test_a.py::test_y",
        "nn/test_a.py::test_z",
        "ops/test_b.py::test_y",
    ]
    assert len(within(21)) == 6


@pytest.mark.parametrize(
    "changed", ["tests/python/ops/test_b.py", "python/monograph/ops/linear.py", "core/monograph/simd/x.h"]
)
def test_what_has_changed_comes_first(changed):
    assert within(10, [changed]) == ["nn/test_a.py::test_x", "ops/test_b.py::test_x", "ops/test_b.py::test_y"]


def test_a_file_of_no_room_changes_no_choice():
    assert within(6, ["README.md", "tools/check_tree.py"]) == within(6)


def collected(*options):
    """The tests of one file that are taken, and the last line, `3/8 tests collected (5 deselected)`."""
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", *options]
    command = [sys.executable, "-m", "pytest", *options, "tests/python/project/test_check_tree.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    return {line for line in lines if "::" in line}, re.search(r"(\d+)/(\d+) tests collected", lines[-1])


def test_the_option_takes_a_part_of_what_is_selected():
    (first, counted), (second, _) = collected("--part", "1/2"), collected("--part", "2/2")
    assert first
    assert second
    assert not first & second
    assert (len(first), len(first | second)) == (int(counted[1]), int(counted[2]))


def test_the_option_takes_no_more_than_the_time_allows():
    some, counted = collected("--within", "0.05")
    assert 0 < len(some) == int(counted[1]) < int(counted[2])
    assert durations.seconds_of(some, durations.read())
    assert sum(durations.seconds_of(some, durations.read()).values()) <= 0.05


@pytest.mark.parametrize("wrong", ["0/4", "5/4", "2", "a/b", "1/0"])
def test_a_part_that_is_none_is_refused(wrong):
    with pytest.raises(ValueError, match=f"--part is {wrong}, wanted K/N with 1 <= K <= N"):
        durations.part_of(wrong)
