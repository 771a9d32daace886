#!/usr/bin/env python3
"""Writes the tables of docs/reference/keys.md from the keys; with --check only says whether they are current.

As a program:

    python tools/recipe_docs.py [--check]
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from collections.abc import Collection
from dataclasses import Field, fields
from typing import Any, get_type_hints

from monograph.recipe.config.check_value import wanted
from monograph.recipe.config.compile_options import OPTIONS
from monograph.recipe.config.dataset_keys import DATASET_REFUSED, TYPE_REFUSED
from monograph.recipe.config.key_row import default_of
from monograph.recipe.config.key_support import IGNORED, REFUSED, State, state_of
from monograph.recipe.config.keys import (
    DATASET_KEYS,
    KEYS,
    DatasetKeys,
    Recipe,
    TrlDatasetKeys,
    TrlRecipe,
)

REFERENCE = pathlib.Path(__file__).parent.parent / "docs" / "reference"
PAGES = [REFERENCE / "keys.md", REFERENCE / "other_keys.md"]
AXOLOTL = pathlib.Path(__file__).parent / "axolotl_schema.json"


def _default(entry: Field[Any]) -> str:
    value = default_of(entry)
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value in (None, "", [], {}) else f"`{value}`"


def _keys(owner: type, besides: Collection[str] = ()) -> str:
    """The rows of a part of the table, but for those of another part."""
    hints = get_type_hints(owner)
    rows = ["| key | value | default | what it does |", "|---|---|---|---|"]
    for entry in fields(owner):
        name = entry.name
        if name in besides:
            continue
        kind = (
            "a list"
            if name in ("datasets", "test_datasets")
            else wanted(hints[name]).removesuffix(" or empty")
        )
        rows.append(f"| `{name}` | {kind} | {_default(entry)} | {entry.metadata['row'].about} |")
    return "\n".join(rows)


def _trl_fields() -> str:
    """What the keys of a recipe set in TRL's config, and which of them it does not have."""
    fields_of_trl = {name: row.trl for name, row in KEYS.items() if isinstance(row.trl, str)}
    renamed = {name: field for name, field in fields_of_trl.items() if name != field}
    same = [f"`{name}`" for name in fields_of_trl if name not in renamed]
    gone = [f"`{name}`" for name, row in KEYS.items() if row.trl is None]
    rows = ["| keys | under TRL |", "|---|---|"]
    rows += [f"| `{name}` | `{field}` |" for name, field in renamed.items()]
    rows.append(f"| {', '.join(same)} | the field of the same name |")
    rows.append(f"| {', '.join(gone)} | refused: they are for Monograph's own trainer |")
    return "\n".join(rows)


def _reasons(entries: dict[str, str], heading: str) -> str:
    """Keys with the same reason share a row."""
    shared: dict[str, list[str]] = {}
    for name, reason in entries.items():
        shared.setdefault(reason, []).append(f"`{name}`")
    rows = [f"| keys | {heading} |", "|---|---|"]
    return "\n".join(rows + [f"| {', '.join(names)} | {reason} |" for reason, names in shared.items()])


_STATES = {
    State("honoured", "honoured"): "honoured",
    State("honoured", "refused"): "honoured; refused with `trainer: trl`",
    State("refused", "honoured"): "honoured with `trainer: trl`, `rl` or `reward_model`; else refused",
    State("ignored", "honoured"): "honoured with `trainer: trl`, `rl` or `reward_model`; else ignored",
    State("ignored", "ignored"): "ignored",
    State("refused", "refused"): "refused",
}


def _axolotl() -> str:
    """Every key of axolotl's schema by its state; inside one that is not honoured all share its state."""
    kept = json.loads(AXOLOTL.read_text(encoding="utf-8"))
    by_state: dict[State | None, list[str]] = {}
    for name in kept["keys"]:
        state, outer = state_of(name), state_of(name.split(".")[0])
        if name.startswith("test_datasets.") or ("." in name and outer and "honoured" not in outer):
            continue
        by_state.setdefault(state, []).append(f"`{name}`")
    rows = [f"| state | keys of axolotl {kept['axolotl']} |", "|---|---|"]
    rows += [f"| {words} | {', '.join(by_state.pop(state, []))} |" for state, words in _STATES.items()]
    assert not by_state, by_state
    return "\n".join(rows)


def tables() -> dict[str, str]:
    """The tables of the page by name."""
    options = {name: reason or "has an effect" for name, reason in OPTIONS.items()}
    return {
        "keys": _keys(Recipe),
        "dataset keys": _keys(DatasetKeys),
        "trl keys": _keys(TrlRecipe, KEYS),
        "trl dataset keys": _keys(TrlDatasetKeys, DATASET_KEYS),
        "trl fields": _trl_fields(),
        "ignored": _reasons(IGNORED, "why"),
        "refused": _reasons(REFUSED, "instead"),
        "refused in datasets": _reasons(DATASET_REFUSED | TYPE_REFUSED, "instead"),
        "axolotl": _axolotl(),
        "options": _reasons(options, "on a CPU"),
    }


def main() -> int:
    before = {page: page.read_text(encoding="utf-8") for page in PAGES}
    texts = dict(before)
    for name, table in tables().items():
        block = f"<!-- {name} -->\n{table}\n<!-- end -->"
        holders = [page for page, text in texts.items() if f"<!-- {name} -->\n" in text]
        if len(holders) != 1:
            print(f"docs/reference: {len(holders)} blocks named {name!r}, wanted 1")
            return 1
        (page,) = holders
        old = re.search(rf"<!-- {name} -->\n.*?<!-- end -->", texts[page], re.DOTALL)
        assert old, name
        texts[page] = texts[page].replace(old[0], block)
    changed = [page for page in PAGES if texts[page] != before[page]]
    if "--check" in sys.argv:
        for page in changed:
            print(f"{page} is not what the keys say; run python tools/recipe_docs.py")
        return int(bool(changed))
    for page in changed:
        page.write_text(texts[page], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
