#!/usr/bin/env python3
"""Writes the tables of docs/recipe.md from the keys; with --check only says whether they are up to date.

As a program:

    python tools/recipe_docs.py [--check]
"""

from __future__ import annotations

import pathlib
import re
import sys
from dataclasses import MISSING, Field
from typing import Any, get_type_hints

from monograph.recipe.check_value import wanted
from monograph.recipe.compile_options import OPTIONS
from monograph.recipe.foreign_keys import IGNORED
from monograph.recipe.keys import DATASET_KEYS, KEYS, DatasetKeys, Recipe
from monograph.recipe.refused_keys import REFUSED

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "recipe.md"


def _default(entry: Field[Any]) -> str:
    value = entry.default if entry.default is not MISSING else entry.default_factory()  # type: ignore[operator]
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value in (None, "", [], {}) else f"`{value}`"


def _keys(entries: dict[str, Field[Any]], owner: type) -> str:
    hints = get_type_hints(owner)
    rows = ["| key | value | default | what it does |", "|---|---|---|---|"]
    for name, entry in entries.items():
        kind = "a list" if name.endswith("datasets") else wanted(hints[name]).removesuffix(" or empty")
        rows.append(f"| `{name}` | {kind} | {_default(entry)} | {entry.metadata['about']} |")
    return "\n".join(rows)


def _reasons(entries: dict[str, str], heading: str) -> str:
    """Keys with the same reason share a row."""
    shared: dict[str, list[str]] = {}
    for name, reason in entries.items():
        shared.setdefault(reason, []).append(f"`{name}`")
    rows = [f"| keys | {heading} |", "|---|---|"]
    return "\n".join(rows + [f"| {', '.join(names)} | {reason} |" for reason, names in shared.items()])


def tables() -> dict[str, str]:
    """The tables of the page by name."""
    options = {name: reason or "has an effect" for name, reason in OPTIONS.items()}
    return {
        "keys": _keys(KEYS, Recipe),
        "dataset keys": _keys(DATASET_KEYS, DatasetKeys),
        "ignored": _reasons(IGNORED, "why"),
        "refused": _reasons(REFUSED, "instead"),
        "options": _reasons(options, "on a CPU"),
    }


def main() -> int:
    before = text = PAGE.read_text(encoding="utf-8")
    for name, table in tables().items():
        block = f"<!-- {name} -->\n{table}\n<!-- end -->"
        text, found = re.subn(rf"<!-- {name} -->\n.*?<!-- end -->", lambda _: block, text, flags=re.DOTALL)  # noqa: B023
        if found != 1:
            print(f"{PAGE}: {found} blocks named {name!r}, wanted 1")
            return 1
    if "--check" in sys.argv:
        if text != before:
            print(f"{PAGE} is not what the keys say; run python tools/recipe_docs.py")
        return int(text != before)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
