"""What a run has written: its losses, and the bytes of its adapter."""

from __future__ import annotations

import os
import pathlib
from typing import Any

from monograph.recipe.run.metrics import read_metrics


def trace(folder: str | pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a run without what depends on the clock or the machine."""
    clock = ("tokens_per_second", "memory_gib")
    lines = read_metrics(os.path.join(folder, "metrics.jsonl"))
    return [{name: value for name, value in line.items() if name not in clock} for line in lines]


def adapter_bytes(folder: str | pathlib.Path) -> bytes:
    with open(os.path.join(folder, "adapter_model.safetensors"), "rb") as file:
        return file.read()
