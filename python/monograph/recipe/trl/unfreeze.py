"""Which weights of a dense base TRL trains without an adapter: all, or those of `unfrozen_parameters`."""

from __future__ import annotations

from typing import Any

from monograph.recipe.config.trl_checks import compiled_pattern
from monograph.recipe.run.load_model import is_packed


def unfreeze(model: Any, patterns: list[str] | None) -> None:
    """Trains all parameters, or those whose names a pattern matches. ValueError for a packed base, or a
    pattern that matches none."""
    if is_packed(model):
        raise ValueError("adapter: missing, and the base is quantised; write adapter: qlora")
    model.requires_grad_(not patterns)
    for pattern in patterns or []:
        matches = compiled_pattern(pattern).match
        found = [value for name, value in model.named_parameters() if matches(name)]
        if not found:
            name = next(iter(model.named_parameters()))[0]
            raise ValueError(f"unfrozen_parameters: {pattern} matches no parameter; names are like {name}")
        for value in found:
            value.requires_grad_(True)
