"""Fills the schemas of docs/reference/operators.md with those of the operator libraries.

    python tools/update_operator_page.py [--check]

The block below the line `<!-- schemas -->` gets every schema of ops/schema.cpp and, behind it, of ops/bench/,
in their order. With --check nothing is written, and the exit code is 1 if the block differs. Either way it
is 1 if an operator has no row in the table below `## Operators`, or a row names one that does not exist.
"""

import argparse
import pathlib
import re
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "operators.md"
BLOCK = re.compile(r"(<!-- schemas -->\n```text\n).*?(\n```\n)", re.DOTALL)
WIDTH = 117


def schemas(root: pathlib.Path = ROOT) -> list[str]:
    sources = [root / "ops" / "schema.cpp", *sorted((root / "ops" / "bench").glob("*.cpp"))]
    found: list[str] = []
    for source in sources:
        calls = re.findall(r'm\.def\(\s*((?:"[^"]*"\s*)+)\)', source.read_text())
        found += ["".join(re.findall(r'"([^"]*)"', call)) for call in calls]
    return found


def wrapped_schema(line: str) -> str:
    """Broken behind arguments and before results, not between a type and its name."""
    whole = re.sub(r"(?<!,) (?!->)", "\0", line)
    return textwrap.fill(whole, WIDTH, subsequent_indent="  ", break_on_hyphens=False).replace("\0", " ")


def filled(text: str, lines: list[str]) -> str:
    wrapped = "\n".join(map(wrapped_schema, lines))
    return BLOCK.sub(lambda match: match[1] + wrapped + match[2], text)


def table_findings(text: str, lines: list[str]) -> list[str]:
    table = text.split("\n## Operators\n")[1].split("\n\n", 3)
    rows = next(part for part in table if part.lstrip().startswith("| operator |")).splitlines()[2:]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    known = {line.split("(")[0] for line in lines}
    return [
        *(f"operator {name} has no row in the table" for name in sorted(known - set(named))),
        *(f"operator {name} has a row, but no schema" for name in sorted(set(named) - known)),
        *(f"operator {name} has two rows" for name in sorted({n for n in named if named.count(n) > 1})),
    ]


def findings(text: str, lines: list[str]) -> list[str]:
    found = [f"docs/reference/operators.md: {what}" for what in table_findings(text, lines)]
    if BLOCK.search(text) is None or filled(text, lines) != text:
        found.append(
            "docs/reference/operators.md: the schemas are not those of ops/; tools/update_operator_page.py"
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    arguments = parser.parse_args()
    text, lines = PAGE.read_text(), schemas()
    if not arguments.check:
        text = filled(text, lines)
        PAGE.write_text(text)
    found = findings(text, lines)
    print("\n".join(found) or f"{len(lines)} operators: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
