"""Phrases that are not to come back, in pages, docstrings, messages and comments. One line per finding.

    python tools/check_prose.py

Each phrase stands here with what to write instead. The changelog tells what was, and is not read.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SUFFIXES = (".md", ".py", ".h", ".cpp", ".cuh", ".cu", ".yml")
NOT_READ = {"CHANGELOG.md", "tools/check_prose.py", "tests/python/project/test_check_prose.py"}
PHRASES = {
    r"\band its kin\b|\band kin\b": "and related methods, and similar",
    r"\bis no number\b|\bare no numbers\b": "is NaN, is not finite",
    r"\bwhole numbers of them\b": "multiples of it",
    r"\bcut among\b": "sharded across",
    r"\bso far nothing\b|\bnothing was run so far\b": "nothing has been run yet",
    r"\bis right and slow\b": "is correct but slow",
    r"\bfigures of record\b": "benchmark results",
    r"\bthe other's time over ours\b": "speed-up over X",
    r"\bmended\b": "fixed",
    r"\btrusts no file\b": "validates every file before using it",
    r"\branks meet\b": "barrier",
    r"\bis as if left out\b": "is ignored",
}


def findings_in(text: str) -> list[tuple[int, str, str]]:
    """(line, phrase, what to write) of a text; a phrase may go over the end of a line."""
    found = []
    # Behind the end of a line: indentation, and the sign of a comment.
    for pattern, instead in PHRASES.items():
        spread = pattern.replace(" ", r"(?:[ ]|\n[ \t]*(?://|#|\*)?[ ]?)")
        for match in re.finditer(spread, text):
            found.append((text.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), instead))
    return sorted(found)


def main() -> int:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    count = 0
    for name in listed.splitlines():
        path = ROOT / name
        if not name.endswith(SUFFIXES) or name in NOT_READ or not path.exists():
            continue
        for line, phrase, instead in findings_in(path.read_text(encoding="utf-8")):
            print(f"{name}:{line}: {phrase!r}, wanted: {instead}")
            count += 1
    print(f"prose: {count} findings" if count else "prose: ok")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
