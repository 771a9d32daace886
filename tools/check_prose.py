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
# Not to come back in the manual: README.md and docs/.
MANUAL = {
    r"\b(?:is|are) refused by name\b": "raises an error",
    r"\bwhile (?:it loads|they load)\b": "on load",
    r"\bkept apart\b": "isolated from each other",
    r"\bbackward keeps\b": "saved for backward",
    r"\bloss of the routers\b": "router auxiliary loss",
    r"\b[Ww]hat is the limit first\b": "what becomes the bottleneck first",
    r"\bas ever\b": "as before, unchanged",
    r"\bno page of a file\b": "not file pages",
    r"\bthe least there is\b": "the minimum",
    r"\bcut over ranks\b": "sharded across ranks",
    r"\blast bits may differ\b|\bwhose last bits\b": "may differ in the last bit",
    r"\bthat is none of\b|\bwhich is none of\b": "that is not",
    r"\b(?:is|are) no (?:multiple|plain|contiguous)\b": "is not a multiple",
    r"\b[Rr]efused by name:": "raise an error:",
    r"(?<![\w.])\d+\.\d+ times (?!the documents)": "1.7x",
}


def findings_in(text: str, *, manual: bool = False) -> list[tuple[int, str, str]]:
    """(line, phrase, what to write) of a text; a phrase may go over the end of a line."""
    found = []
    # Behind the end of a line: indentation, and the sign of a comment.
    for pattern, instead in (PHRASES | MANUAL if manual else PHRASES).items():
        spread = pattern.replace(" ", r"(?:[ ]|\n[ \t]*(?://|#|\*)?[ ]?)")
        for match in re.finditer(spread, text):
            found.append((text.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), instead))
    return sorted(found)


def in_manual(name: str) -> bool:
    """The page of the native tool is what the program prints."""
    pages = name.startswith("docs/") and name.endswith(".md")
    return name == "README.md" or (pages and name != "docs/reference/cli.md")


def main() -> int:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    count = 0
    for name in listed.splitlines():
        path = ROOT / name
        if not name.endswith(SUFFIXES) or name in NOT_READ or not path.exists():
            continue
        for line, phrase, instead in findings_in(path.read_text(encoding="utf-8"), manual=in_manual(name)):
            print(f"{name}:{line}: {phrase!r}, wanted: {instead}")
            count += 1
    print(f"prose: {count} findings" if count else "prose: ok")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
