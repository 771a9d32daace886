"""Writes the tables of docs/reliability.md from the lines of bench/results.

    python tools/reliability_page.py [--check]

With --check nothing is written, and the exit code is 1 if a table is not what the lines say.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from collections import Counter
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reliability.md"
RESULTS = ROOT / "bench" / "results"


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def table(header: str, rows: list[str]) -> str:
    return "\n".join([header, re.sub(r"[^|]+", "---", header), *rows])


def disk_faults() -> str:
    """A row a command: calls that were refused, where, how the command ended, what was lost."""
    found = lines("disk_faults.jsonl")
    rows = []
    for command in dict.fromkeys(row["command"] for row in found):
        own = [row for row in found if row["command"] == command and row["points"]]
        exits: Counter[str] = Counter()
        for row in own:
            exits.update(row["exits"])
        ended = ", ".join(f"{code}: {count}" for code, count in sorted(exits.items()))
        points, lost = sum(row["points"] for row in own), sum(len(row["losses"]) for row in own)
        calls = ", ".join(dict.fromkeys(row["call"] for row in own))
        rows.append(f"| `{command}` | {calls} | {points:,} | {ended} | {lost} |")
    return table("| command | calls | points | exit codes | lost |", rows)


def fuzz() -> str:
    """A row a target: executions of all runs, by build."""
    found = lines("fuzz.jsonl")
    rows = []
    for target in sorted({row["target"] for row in found}):
        own = [row for row in found if row["target"] == target]
        executions = sum(row["executions"] for row in own)
        findings = sum(row["findings"] for row in own)
        builds = ", ".join(sorted({row["build"] for row in own}))
        rows.append(f"| `{target}` | {builds} | {executions:,} | {findings} | {own[-1]['date']} |")
    total = sum(row["executions"] for row in found)
    return table("| target | build | executions | findings | last |", [*rows, f"| all | | {total:,} | | |"])


TABLES = {"disk faults": disk_faults, "fuzz": fuzz}


def written(page: str) -> str:
    for name, make in TABLES.items():
        begin, end = f"<!-- {name} -->\n", "<!-- end -->"
        before, found, rest = page.partition(begin)
        if not found or end not in rest:
            raise SystemExit(f"{PAGE.name}: no place for the table '{name}'")
        page = before + begin + make() + "\n" + rest[rest.index(end) :]
    return page


def main() -> int:
    page = PAGE.read_text()
    wanted = written(page)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(wanted)
        return 0
    if page != wanted:
        print(f"{PAGE.relative_to(ROOT)}: tables are not those of bench/results; run this without --check")
    return int(page != wanted)


if __name__ == "__main__":
    sys.exit(main())
