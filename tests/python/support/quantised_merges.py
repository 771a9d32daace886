"""What a merge onto a quantised base must hold, and the comparison."""

from __future__ import annotations

import pathlib
from typing import Any

from safetensors.torch import load_file

from support.merge_reference import stored


def expected(base: Any, adapter: Any, alpha_over_r: float) -> dict[str, Any]:
    """float64 values of the merged linear layers."""
    wanted = {}
    for name, weight in base.items():
        prefix = "base_model.model." + name.removesuffix("weight")
        a, b = adapter.get(prefix + "lora_A.weight"), adapter.get(prefix + "lora_B.weight")
        delta = 0 if a is None else alpha_over_r * (b.double() @ a.double())
        wanted[name] = (weight.double() + delta).numpy()
    return wanted


def check(folder: pathlib.Path, wanted: dict[str, Any]) -> None:
    found = load_file(folder / "model.safetensors")
    for name, value in wanted.items():
        rounded, near = stored(value, found[name].dtype)
        assert not ((found[name].double().numpy() != rounded) & ~near).any(), name
