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
        place: Any = keys
        for done, part in enumerate(path):
            if isinstance(place, list):
                place = _entry(place, part, ".".join(path[:done]))
            else:
                if place.get(part) is None:
                    place[part] = {}
                place = place[part]
            if not isinstance(place, dict | list):
                raise ValueError(
                    f"--{name}: {'.'.join(path[: done + 1])} is {place!r}, not a mapping or list"
                )
        if isinstance(place, list):
            _entry(place, last, ".".join(path))
            place[int(last)] = value
        else:
            place[last] = value


def _entry(place: list[Any], part: str, where: str) -> Any:
    if not part.isdigit() or int(part) >= len(place):
        raise ValueError(f"--{where}.{part}: {where} has {len(place)} entries, wanted a number below that")
    return place[int(part)]
