#!/usr/bin/env python3
"""Reads the names of axolotl's keys from its source distribution and lists those that a recipe does not know.

As a program:

    pip download axolotl --no-deps --no-binary :all: -d /tmp/axolotl
    python tools/axolotl_schema.py /tmp/axolotl/axolotl-*.tar.gz [--write]

Its classes are parsed, never imported. --write keeps the names in tools/axolotl_schema.json, from which
tools/recipe_docs.py makes a table of docs/reference/other_keys.md.
"""

from __future__ import annotations

import argparse
import ast
import json
import pathlib
import re
import sys
import tarfile
from dataclasses import dataclass, field
from typing import Any

NAMES = pathlib.Path(__file__).parent / "axolotl_schema.json"
ROOT = "AxolotlInputConfig"
_SOURCES = re.compile(r"/src/axolotl/(utils/schemas|integrations)/.*\.py$")


@dataclass
class Model:
    """A class of the schema: its bases, and the names that its fields mention in their types, by key."""

    bases: list[str]
    fields: dict[str, list[str]] = field(default_factory=dict)


def read_sources(archive: str) -> tuple[str, dict[str, str]]:
    """The version of a source distribution and the texts of its schema by path."""
    with tarfile.open(archive) as opened:
        members = [entry for entry in opened.getmembers() if entry.isfile()]
        root = members[0].name.split("/")[0]
        texts = {}
        for entry in members:
            if _SOURCES.search(entry.name):
                read = opened.extractfile(entry)
                assert read is not None
                texts[entry.name] = read.read().decode()
    return root.rpartition("-")[2], texts


def _own_fields(node: ast.ClassDef) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in node.body:
        if not (isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)):
            continue
        mentioned = [entry.id for entry in ast.walk(line.annotation) if isinstance(entry, ast.Name)]
        if "ClassVar" in mentioned or line.target.id.startswith("_"):
            continue
        names = [line.target.id]
        if isinstance(line.value, ast.Call):  # Field(alias=...): both names are taken
            names += [
                str(option.value.value)
                for option in line.value.keywords
                if option.arg in ("alias", "validation_alias") and isinstance(option.value, ast.Constant)
            ]
        found |= dict.fromkeys(names, mentioned)
    return found


def read_models(texts: dict[str, str]) -> tuple[dict[str, Model], list[str]]:
    """All classes with annotated fields, and those that plugins add to the keys (`get_input_args`)."""
    models: dict[str, Model] = {}
    of_plugins = []
    for text in texts.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                bases = [entry.id for entry in node.bases if isinstance(entry, ast.Name)]
                models.setdefault(node.name, Model(bases, _own_fields(node)))
            elif isinstance(node, ast.FunctionDef) and node.name == "get_input_args":
                of_plugins += [
                    str(entry.value.value).rpartition(".")[2]
                    for entry in ast.walk(node)
                    if isinstance(entry, ast.Return) and isinstance(entry.value, ast.Constant)
                ]
    return models, [name for name in of_plugins if name in models]


def fields_of(models: dict[str, Model], name: str) -> dict[str, list[str]]:
    """Fields of a class and of those it derives from."""
    if name not in models:
        return {}
    inherited: dict[str, list[str]] = {}
    for base in models[name].bases:
        inherited |= fields_of(models, base)
    return inherited | models[name].fields


def schema(texts: dict[str, str]) -> list[str]:
    """All keys in the alphabet's order; `a.b` is the key b inside a."""
    models, of_plugins = read_models(texts)
    if ROOT not in models:
        raise ValueError(f"no class {ROOT} in the archive; wanted a source distribution of axolotl")
    keys = fields_of(models, ROOT)
    for plugin in of_plugins:
        keys |= fields_of(models, plugin)
    names: set[str] = set()

    def add(path: str, mentioned: list[str]) -> None:
        names.add(path)
        for kind in mentioned:
            for inside, types in fields_of(models, kind).items():
                add(f"{path}.{inside}", types)

    for name, mentioned in keys.items():
        add(name, mentioned)
    return sorted(names)


def unknown_keys(names: list[str]) -> list[str]:
    """Those that no table of a recipe has."""
    from monograph.recipe.config.key_support import state_of

    return [name for name in names if state_of(name) is None]


def main() -> int:
    parser = argparse.ArgumentParser(description="Keys of axolotl that a recipe does not know.")
    parser.add_argument("archive", help="axolotl-VERSION.tar.gz")
    parser.add_argument("--write", action="store_true", help=f"keep the names in {NAMES.name}")
    options = parser.parse_args()
    version, texts = read_sources(options.archive)
    names = schema(texts)
    if options.write:
        kept: dict[str, Any] = {"axolotl": version, "keys": names}
        NAMES.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    unknown = unknown_keys(names)
    print(f"axolotl {version}: {len(names)} keys, {len(unknown)} unknown", *unknown, sep="\n")
    return int(bool(unknown))


if __name__ == "__main__":
    sys.exit(main())
