"""The rotating lane of `.ci/run`: stages too long for every run, with the commit at which each last passed.

    python tools/rotation.py table             # age of every stage; exit code 1 if one is overdue
    python tools/rotation.py next --left 1500  # the oldest due stage that fits into 1500 s, or nothing
    python tools/rotation.py passed tsan 640   # HEAD passed `tsan` in 640 s: rewrites .ci/rotation.json

The age of a stage is the number of commits since then that touch its paths. It is due at one, and overdue
above 200 or if it never passed. A commit that is no ancestor of HEAD (a rebase, another branch) counts as
never passed. `.ci/run` rewrites .ci/rotation.json; whoever runs it commits the file.
"""

from __future__ import annotations

import argparse
import json
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
    """A function of `.ci/rotating.sh`; `seconds` is used until a run has recorded its own."""

    name: str
    paths: tuple[str, ...]
    seconds: int


STAGES = (
    Stage("tsan", ("core", *BUILD), 900),
    Stage("tidy_core", ("core", ".clang-tidy"), 900),
    Stage("tidy_rest", ("ops", "cli", ".clang-tidy"), 900),
    Stage("aarch64", ("core", *BUILD), 1500),
    Stage("aarch64_operators", ("core", "ops", *BUILD), 600),
    Stage("clang", ("core", "ops", "cli", *BUILD), 900),
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
        400,
    ),
    Stage("site", ("docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "mkdocs.yml", "tools/site"), 120),
    *(Stage(f"long_tests_{part}", ("tests/python", *PRODUCT), 900) for part in (1, 2, 3, 4)),
    Stage(
        "scale",
        ("python/monograph/distributed", "python/monograph/training", "python/monograph/regions"),
        900,
    ),
    Stage("fault_matrix", ("python/monograph/distributed", "python/monograph/training", "core", "ops"), 1200),
    Stage("fuzz_long", ("core",), 900),
    Stage("hostile_long", ("core", "ops"), 600),
    Stage("versions", ("ops", "python", "pyproject.toml"), 1200),
    Stage("reproducible", ("core", "ops", "cli", "pyproject.toml", "tools/release", *BUILD), 900),
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


def age(stage: Stage, record: Record) -> int:
    """Commits since the stage last passed that touch its paths; NEVER without such a commit before HEAD."""
    commit = str(record.get(stage.name, {}).get("passed", ""))
    if not commit or not is_ancestor(commit):
        return NEVER
    return int(git("rev-list", "--count", f"{commit}..HEAD", "--", *stage.paths))


def expected_seconds(stage: Stage, record: Record) -> float:
    return MARGIN * int(record.get(stage.name, {}).get("seconds", stage.seconds))


def choose(ages: dict[str, int], record: Record, left: float, not_again: set[str]) -> str | None:
    """The oldest stage that is due, fits into the seconds left and has not been run yet in this run."""
    fitting = [
        stage
        for stage in STAGES
        if ages[stage.name] > 0 and stage.name not in not_again and expected_seconds(stage, record) <= left
    ]
    # Of two equally old ones the longer first: the shorter may still fit after it.
    oldest = max(fitting, key=lambda s: (ages[s.name], expected_seconds(s, record)), default=None)
    return oldest.name if oldest else None


def write_passed(name: str, seconds: int) -> str | None:
    """Records HEAD, or returns why not: a tree that differs from HEAD shows nothing about HEAD."""
    changed = git("status", "--porcelain", "--", *BY_NAME[name].paths)
    if changed:
        return f"{name}: passed, not recorded: uncommitted changes\n{changed}"
    record = read_record()
    record[name] = {"passed": git("rev-parse", "HEAD"), "seconds": seconds}
    known = {stage.name: record[stage.name] for stage in STAGES if stage.name in record}
    RECORD.write_text(json.dumps(known, indent=2) + "\n")
    return None


def print_table(ages: dict[str, int]) -> bool:
    """One line a stage, then a count; whether all is well."""
    overdue = [name for name, commits in ages.items() if commits > OVERDUE]
    for name, commits in sorted(ages.items(), key=lambda item: -item[1]):
        state = (
            "never passed"
            if commits == NEVER
            else f"passed {commits} commits ago"
            if commits
            else "up to date"
        )
        print(f"{name:18} {state}{', OVERDUE' if name in overdue else ''}")
    due = sum(commits > 0 for commits in ages.values())
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
    arguments = parser.parse_args()
    if arguments.command == "names":
        print(*BY_NAME)
        return 0
    if arguments.command == "passed":
        if reason := write_passed(arguments.stage, arguments.seconds):
            print(reason)
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
