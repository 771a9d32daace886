#!/usr/bin/env python3
"""Reads the training examples of axolotl as recipes and counts those accepted and those refused, by reason.

No model is loaded and nothing is downloaded. As a program, with a checkout of axolotl:

    python tools/axolotl_examples.py FOLDER [--files]
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys
from collections import Counter
from typing import Any, NamedTuple

import yaml

from monograph.recipe import ConfigError, read_config

# What is missing, by the keys that ask for it. Of a file with several reasons the first of these counts.
CAPABILITIES: dict[str, str] = {
    "full fine-tuning": r"adapter: missing",
    "images and sound": r"skip_prepare_dataset|freeze_mm_modules|image_|processor_",
    "losses of energy-based fine-tuning": r"ebft|rl is 'ebft'",
    "training that knows of quantisation": r"qat|nvfp4_merge_aware|fp8|use_onebitllms",
    "a format of the base": r"gptq|model_quantization_config|llama4_linearized_experts",
    "sequences and experts sharded across ranks": r"context_para\w+_size|tensor_parallel_size|"
    r"expert_parallel|plugins: .*expert_parallel|sequence_parallel",
    "another launcher": r"use_ray|ray_",
    "restarts of adapters": r"relora|jagged_restart",
    "another order or choice of rows": r"sample_packing_sequentially|curriculum_sampling|"
    r"dataset_exact_deduplication",
    "a type of dataset": r"datasets\.\d+\.|datasets: missing|pretraining_dataset|streaming",
}


class Read(NamedTuple):
    """path: inside the folder; errors: none if it is accepted."""

    path: str
    adapter: str | None
    errors: list[str]
    notices: list[str]


def examples(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files that name a model to train; others configure clouds and the like."""
    found = []
    for path in sorted(folder.rglob("*.y*ml")):
        keys = _keys(path)
        if "base_model" in keys:
            found.append(path)
    return found


def _keys(path: pathlib.Path) -> dict[str, Any]:
    try:
        keys = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError:
        return {}
    return keys if isinstance(keys, dict) else {}


def read(path: pathlib.Path, root: pathlib.Path) -> Read:
    """What the reader of recipes says of a file."""
    adapter = _keys(path).get("adapter") or None
    try:
        return Read(str(path.relative_to(root)), adapter, [], read_config(str(path)).notices)
    except ConfigError as error:
        return Read(str(path.relative_to(root)), adapter, error.errors, [])


def capability(errors: list[str]) -> str:
    """What is missing for a file; the key alone where no capability is named."""
    for name, keys in CAPABILITIES.items():
        if any(re.match(keys, error) for error in errors):
            return name
    return f"`{re.split(r'[: ]', errors[0])[0]}`"


def instead(name: str, errors: list[str]) -> str:
    """The nearest alternative, in the words of the refusal."""
    keys = CAPABILITIES.get(name, "")
    error = next((error for error in errors if keys and re.match(keys, error)), errors[0])
    for border in (": not supported; ", "; ", ", wanted "):
        if border in error:
            return error.split(border, 1)[1]
    return error


def table(title: str, found: list[Read]) -> list[str]:
    """Markdown: accepted, and refused by what is missing."""
    accepted = [entry for entry in found if not entry.errors]
    lines = [f"| {title} | files | nearest alternative |", "|---|---|---|"]
    lines.append(f"| **accepted** | **{len(accepted)} of {len(found)}** | |")
    refused = [(capability(entry.errors), entry) for entry in found if entry.errors]
    counts = Counter(name for name, _ in refused)
    for name, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])):
        first = next(entry for other, entry in refused if other == name)
        words = instead(name, first.errors)
        lines.append(f"| {name} | {count} | {words} |")
    return lines


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=pathlib.Path, help="a checkout of axolotl")
    parser.add_argument("--files", action="store_true", help="a line for each file, too")
    options = parser.parse_args(arguments)
    root = options.folder / "examples"
    if not root.is_dir():
        parser.error(f"{root} is no folder; wanted a checkout of axolotl")
    found = [read(path, root) for path in examples(root)]
    adapted = [entry for entry in found if entry.adapter in ("lora", "qlora")]
    others = [entry for entry in found if entry not in adapted]
    print(f"{len(found)} training examples, {len(adapted)} with adapter lora or qlora\n")
    print("\n".join([*table("lora and qlora", adapted), "", *table("others", others)]))
    if options.files:
        print()
        for entry in found:
            print(f"{entry.path}: {'; '.join(entry.errors) or 'accepted'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
