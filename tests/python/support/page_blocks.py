"""The fenced blocks of the pages: what each is, and the commands of those without a language.

A block without a language holds commands. If one of its lines begins with "$ ", commands are the lines that
do, and the others are their output; otherwise every line is a command. A script for `python - <<'END'` is
part of its command. Output, figures and formulas that stand alone are blocks of the language `text`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from support.native_tool import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


@dataclass(frozen=True)
class Block:
    """before: the last line of prose above; number: among the blocks of this page and language, from 0."""

    page: str
    language: str
    number: int
    text: str
    before: str

    def __str__(self) -> str:
        return f"{self.page}: {self.language or 'commands'} {self.number}"


def blocks() -> Iterator[Block]:
    for path in PAGES:
        page, counts, before = path.relative_to(ROOT).as_posix(), dict[str, int](), ""
        language, held = None, list[str]()
        for line in path.read_text(encoding="utf-8").splitlines():
            fence = re.fullmatch(r"\s*(?:```|~~~)(.*)", line)
            if language is None and fence:
                language, held = fence[1].strip(), []
            elif language is None:
                before = line.strip() or before
            elif fence:
                number = counts.get(language, 0)
                counts[language] = number + 1
                yield Block(page, language, number, "".join(f"{each}\n" for each in held), before)
                language = None
            else:
                held.append(line)
        assert language is None, f"{page}: a block without an end"


def commands_of(block: Block) -> Iterator[str]:
    """Without the comments behind them."""
    if block.language:
        return
    lines = block.text.splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    rest = iter(lines)
    for line in rest:
        if line.endswith("<<'END'"):
            script = [line]
            while script[-1] != "END":
                script.append(next(rest))
            yield "\n".join(script)
        elif command := re.sub(r"(^|\s+)#.*", "", line).strip():
            yield command


def commands() -> Iterator[tuple[str, str]]:
    """(page, command) in order."""
    for block in blocks():
        for command in commands_of(block):
            yield block.page, command
