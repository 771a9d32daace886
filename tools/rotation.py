"""The rotating lane of `.ci/run`: stages too long for every run, with the commit at which each last passed.

    python tools/rotation.py table             # age of every stage; exit code 1 if one is overdue
    python tools/rotation.py next --left 1500  # the oldest due stage that fits into 1500 s, or nothing
    python tools/rotation.py passed tsan 640   # HEAD passed `tsan` in 640 s: rewrites .ci/rotation.json
    python tools/rotation.py add tsan          # a new stage: HEAD is where its age begins until it passes

The age of a stage is the number of commits since it last passed that touch its paths. It is due at one, and
overdue above 200. A commit that is no ancestor of HEAD (a rebase, another branch) counts as never passed:
such a stage is due at once, its age begins where it was added, and without such a commit it is overdue.
A stage that was never timed is run by its name, `.ci/run STAGE`, before a whole run takes it.
`.ci/run` rewrites .ci/rotation.json; whoever runs it commits the file.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / ".ci" / "rotation.json"
OVERDUE = 200
NEVER = 10**9
# A recorded time is that of one machine on one day.
MARGIN = 1.3

BUILD = ("CMakeLists.txt", "CMakePresets.json", "cmake")
PRODUCT = ("core", "ops", "cli", "python", "pyproject.toml", *BUILD)


@dataclass(frozen=True)
class Stage:
    """A function of `.ci/rotating.sh`."""

    name: str
    paths: tuple[str, ...]


STAGES = (
    Stage("tsan", ("core", *BUILD)),
    Stage("asan_gpu", ("core", *BUILD)),
    Stage("tidy_core", ("core", ".clang-tidy")),
    Stage("tidy_rest", ("ops", "cli", ".clang-tidy")),
    Stage("aarch64", ("core", *BUILD)),
    Stage("aarch64_operators", ("core", "ops", "cli", *BUILD)),
    Stage("aarch64_python", ("core", "ops", "python", "tools/aarch64", *BUILD)),
    Stage("clang", ("core", "ops", "cli", *BUILD)),
    Stage(
        "cuda",
        (
            "core/monograph/gpu",
            "core/monograph/formats",
            "core/monograph/base",
            ":(glob)core/monograph/kernels/**/*.cuh",
            "ops/cuda",
            "ops/arguments",
            "tools/check_cuda.py",
            "tools/check_hip.py",
        ),
    ),
    Stage(
        "site",
        ("docs", "recipes", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "mkdocs.yml", "tools/site"),
    ),
    Stage("page_tests", ("docs", "recipes", "README.md", "CONTRIBUTING.md", "cli", "python")),
    *(Stage(f"long_tests_{part}", ("tests/python", *PRODUCT)) for part in (1, 2, 3, 4)),
    Stage("between_steps", ("python/monograph/training", "python/monograph/memory", "python/monograph/ops")),
    Stage(
        "scale",
        ("python/monograph/distributed", "python/monograph/training"),
    ),
    Stage("fault_matrix", ("python/monograph/distributed", "python/monograph/training", "core", "ops")),
    Stage("fuzz_long", ("core",)),
    Stage("hostile_long", ("core", "ops")),
    Stage("versions", ("ops", "python", "pyproject.toml")),
    Stage("reproducible", ("core", "ops", "cli", "pyproject.toml", "tools/release", *BUILD)),
)
BY_NAME = {stage.name: stage for stage in STAGES}


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def is_ancestor(commit: str) -> bool:
    command = ["git", "merge-base", "--is-ancestor", commit, "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0


Record = dict[str, dict[str, str | int]]


def read_record(path: Path = RECORD) -> Record:
    return json.loads(path.read_text()) if path.exists() else {}


@dataclass(frozen=True)
class Age:
    """`commits` that touch the paths of a stage, since it passed or, if it never did, since it was added."""

    passed: bool
    commits: int

    @property
    def due(self) -> bool:
        return self.commits > 0 or not self.passed

    @property
    def overdue(self) -> bool:
        return self.commits > OVERDUE

    def __str__(self) -> str:
        if self.passed:
            return f"passed {self.commits} commits ago" if self.commits else "up to date"
        return "never passed" if self.commits == NEVER else f"never passed, added {self.commits} commits ago"


def age(stage: Stage, record: Record) -> Age:
    for event in ("passed", "added"):
        commit = str(record.get(stage.name, {}).get(event, ""))
        if commit and is_ancestor(commit):
            count = git("rev-list", "--count", f"{commit}..HEAD", "--", *stage.paths)
            return Age(event == "passed", int(count))
    return Age(False, NEVER)


def expected_seconds(stage: Stage, record: Record) -> float:
    """Of a stage that was never timed nobody knows whether it fits: it is run by its name first."""
    return MARGIN * float(record.get(stage.name, {}).get("seconds", math.inf))


def choose(ages: dict[str, Age], record: Record, left: float, not_again: set[str]) -> str | None:
    """The oldest stage that is due, fits into the seconds left and has not been run yet in this run."""
    fitting = [
        stage
        for stage in STAGES
        if ages[stage.name].due and stage.name not in not_again and expected_seconds(stage, record) <= left
    ]

    # What never passed first; of two equally old ones the longer: the shorter may still fit after it.
    def order(stage: Stage) -> tuple[bool, int, float]:
        found = ages[stage.name]
        return not found.passed, found.commits, expected_seconds(stage, record)

    oldest = max(fitting, key=order, default=None)
    return oldest.name if oldest else None


def write(name: str, **changes: str | int) -> None:
    record = read_record()
    record[name] = record.get(name, {}) | changes
    known = {stage.name: record[stage.name] for stage in STAGES if stage.name in record}
    RECORD.write_text(json.dumps(known, indent=2) + "\n")


def write_passed(name: str, seconds: int) -> str | None:
    """Records HEAD, or returns why not: a tree that differs from HEAD shows nothing about HEAD."""
    changed = git("status", "--porcelain", "--", *BY_NAME[name].paths)
    if changed:
        return f"{name}: passed, not recorded: uncommitted changes\n{changed}"
    write(name, passed=git("rev-parse", "HEAD"), seconds=seconds)
    return None


def print_table(ages: dict[str, Age]) -> bool:
    """One line a stage, then a count; whether all is well."""
    overdue = [name for name, found in ages.items() if found.overdue]
    for name, found in sorted(ages.items(), key=lambda item: -item[1].commits):
        print(f"{name:18} {found}{', OVERDUE' if found.overdue else ''}")
    due = sum(found.due for found in ages.values())
    names = f": {' '.join(overdue)}" if overdue else ""
    print(f"rotating: {len(ages)} stages, {due} due, {len(overdue)} overdue{names}")
    return not overdue


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser("table", help="age of every stage; exit code 1 if one is overdue")
    commands.add_parser("names", help="the names of all stages")
    following = commands.add_parser("next", help="the oldest due stage that fits")
    following.add_argument("--left", type=float, required=True, metavar="SECONDS")
    following.add_argument("--not", nargs="*", default=[], dest="ran", metavar="STAGE")
    passed = commands.add_parser("passed", help="record HEAD for a stage")
    passed.add_argument("stage", choices=BY_NAME)
    passed.add_argument("seconds", type=int)
    added = commands.add_parser("add", help="record HEAD as where the age of a new stage begins")
    added.add_argument("stage", choices=BY_NAME)
    arguments = parser.parse_args()
    if arguments.command == "names":
        print(*BY_NAME)
        return 0
    if arguments.command == "passed":
        if reason := write_passed(arguments.stage, arguments.seconds):
            print(reason)
        return 0
    if arguments.command == "add":
        write(arguments.stage, added=git("rev-parse", "HEAD"))
        return 0
    if git("rev-parse", "--is-shallow-repository") == "true":
        print("a shallow clone has no ages: fetch the whole history", file=sys.stderr)
        return 2
    record = read_record()
    ages = {stage.name: age(stage, record) for stage in STAGES}
    if arguments.command == "table":
        return 0 if print_table(ages) else 1
    name = choose(ages, record, arguments.left, set(arguments.ran))
    if name:
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
