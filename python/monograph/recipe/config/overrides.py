"""`--key value` on the command line over the keys of a file, dotted into lists and mappings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Pairs from `--lora-r 8`, `--lora_r=8`, `--no-sample-packing`, `--datasets.0.path a`.

    Dashes are underscores; values are read as YAML. A key without a value is true.
    """
    overrides: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or len(word) < 3:
            raise ValueError(f"{word!r} is not an option; wanted --key value")
        name, equals, value = word[2:].partition("=")
        if equals:
            overrides[name.replace("-", "_")] = read_scalar(value)
        elif rest and not rest[0].startswith("--"):
            overrides[name.replace("-", "_")] = read_scalar(rest.pop(0))
        elif name.startswith("no-"):
            overrides[name[3:].replace("-", "_")] = False
        else:
            overrides[name.replace("-", "_")] = True
    return overrides


def read_scalar(text: str) -> Any:
    """A value as YAML reads it; text that is no YAML stays text."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def apply_overrides(keys: dict[str, Any], overrides: dict[str, Any]) -> None:
    """Changes `keys` in place. A dotted name goes into lists (by number) and mappings, made where missing."""
    for name, value in overrides.items():
        *path, last = name.split(".")
        node: Any = keys
        for done, part in enumerate(path):
            if isinstance(node, list):
                node = _entry(node, part, ".".join(path[:done]))
            else:
                if node.get(part) is None:
                    node[part] = {}
                node = node[part]
            if not isinstance(node, dict | list):
                raise ValueError(f"--{name}: {'.'.join(path[: done + 1])} is {node!r}, not a mapping or list")
        if isinstance(node, list):
            _entry(node, last, ".".join(path))
            node[int(last)] = value
        else:
            node[last] = value


def _entry(node: list[Any], part: str, where: str) -> Any:
    if not part.isdigit() or int(part) >= len(node):
        raise ValueError(f"--{where}.{part}: {where} has {len(node)} entries, wanted a number below that")
    return node[int(part)]
