"""For all tests: how to find `support`, how long they took, and parts of them that take equally long.

Files whose tests generate code, train or run other programs are marked: `pytestmark = pytest.mark.slow`. The
tests that take longest of all are marked `long`. Both run in the rotating lane, in quarters: `.ci/run
long_tests_1` to `long_tests_4`; a file marked `apart` too has a stage of its own.

    pytest --write-durations tests/durations.json      # seconds of each file, merged with what is there
    pytest -m long --part 2/4                          # the second of four parts of about equal time
"""

from __future__ import annotations

import os
import pathlib

import pytest

from support import durations

# Programs that tests start import `support` too.
_PATHS = [str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in _PATHS if path)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("durations")
    group.addoption("--part", metavar="K/N", help="one of N parts of about equal time: tests/durations.json")
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
    if not (part := config.getoption("--part")):
        return
    number, count = durations.part_of(part)
    chosen = set(durations.parts([item.nodeid for item in items], durations.read(), count)[number - 1])
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]


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
