"""For all tests: how to find `support`, how long they took, and a choice of them by time.

Files whose tests generate code, train or run other programs are marked: `pytestmark = pytest.mark.slow`. The
tests that take longest of all are marked `long`. Both run in the rotating lane, in quarters: `.ci/run
long_tests_1` to `long_tests_4`; a file marked `apart` too has a stage of its own.

    pytest --write-durations tests/durations.json      # seconds of each file, merged with what is there
    pytest -m long --part 2/4                          # the second of four parts of about equal time
    pytest --within 200                                # what changed first, then the quickest: 200 s together
"""

from __future__ import annotations

import os
import pathlib
import subprocess

import pytest

from support import durations

# Programs that tests start import `support` too.
_PATHS = [str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in _PATHS if path)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("durations")
    group.addoption("--part", metavar="K/N", help="one of N parts of about equal time: tests/durations.json")
    group.addoption(
        "--within", metavar="SECONDS", type=float, help="tests that take so long together; what changed first"
    )
    group.addoption("--write-durations", metavar="FILE", help="merge the seconds of this run into FILE")


def pytest_configure(config: pytest.Config) -> None:
    if part := config.getoption("--part"):
        try:
            durations.part_of(part)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
    file = config.getoption("--write-durations")
    if file and not hasattr(config, "workerinput"):  # under xdist all reports come to the first process
        config.pluginmanager.register(_Durations(pathlib.Path(file)))


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, limit = config.getoption("--part"), config.getoption("--within")
    tests = [item.nodeid for item in items]
    if part:
        number, count = durations.part_of(part)
        tests = durations.parts(tests, durations.read(), count)[number - 1]
    if limit is not None:
        tests = durations.within(tests, durations.read(), limit, _changed_files())
    if not part and limit is None:
        return
    chosen = set(tests)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]


def _changed_files() -> list[str]:
    """What differs from the last commit, from the root of the tree on; new files too."""
    command = [
        "git",
        "-C",
        str(durations.FILE.parents[1]),
        "status",
        "--porcelain",
        "--untracked-files=all",
        "--no-renames",
    ]
    status = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [line[3:].strip('"') for line in status.splitlines()]


class _Durations:
    def __init__(self, path: pathlib.Path) -> None:
        self._path, self._seconds, self._skipped = path, dict[str, float](), set[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if not report.passed:
            self._skipped.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        passed = {test: seconds for test, seconds in self._seconds.items() if test not in self._skipped}
        durations.write(self._path, passed)
