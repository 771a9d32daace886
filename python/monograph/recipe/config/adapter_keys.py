"""The keys of an adapter: which they are, what PEFT calls them, and what is wrong with them together."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from typing import Any

from monograph.recipe.config.keys import KEYS, Recipe

# What PEFT calls the keys whose value adapter_config.json keeps as it was written.
PEFT_NAMES = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
    "lora_target_parameters": "target_parameters",
    "lora_modules_to_save": "modules_to_save",
    "lora_rank_pattern": "rank_pattern",
    "lora_alpha_pattern": "alpha_pattern",
    "peft_use_rslora": "use_rslora",
    "peft_use_dora": "use_dora",
    "peft_layers_to_transform": "layers_to_transform",
    "peft_layers_pattern": "layers_pattern",
    "peft_trainable_token_indices": "trainable_token_indices",
    "peft_ensure_weight_tying": "ensure_weight_tying",
}
ADAPTER_KEYS = tuple(name for name in KEYS if name.startswith(("lora_", "peft")) and name != "lora_model_dir")
# PEFT writes the layers that it found, not the words they were asked for by.
_TARGETS = ("lora_target_linear", "lora_target_modules", "lora_target_parameters")


def check_adapter_keys(recipe: Recipe, written: Collection[str]) -> tuple[list[str], list[str]]:
    """Errors and notices; `written` are the keys that the recipe has, be it with their defaults."""
    if recipe.lora_model_dir:
        return _beside_given_adapter(recipe, [name for name in ADAPTER_KEYS if name in written])
    if recipe.lora_target_linear and isinstance(recipe.lora_target_modules, str):
        return [
            f"lora_target_modules is the regular expression {recipe.lora_target_modules!r} and "
            "lora_target_linear true; wanted a list of names, which are taken besides all linear layers, or "
            "the expression alone"
        ], []
    return [], []


def _beside_given_adapter(recipe: Recipe, written: list[str]) -> tuple[list[str], list[str]]:
    """The adapter of lora_model_dir goes on as it is: other values are refused, those that cannot be compared
    are told."""
    config = given_config(recipe.lora_model_dir or "")
    errors, told = [], []
    for name in written:
        value = getattr(recipe, name)
        if name in PEFT_NAMES and config and _same(value, config.get(PEFT_NAMES[name])):
            continue
        if not value and name not in PEFT_NAMES:
            continue  # as if it were not there
        if name in _TARGETS or name not in PEFT_NAMES or not config:
            told.append(name)
        else:
            errors.append(
                f"{name} is {value!r}, and the adapter of lora_model_dir ({recipe.lora_model_dir}) has "
                f"{config.get(PEFT_NAMES[name])!r}, with which it goes on; leave {name} out"
            )
    notice = (
        f"{', '.join(told)}: ignored; the adapter of lora_model_dir goes on with its own layers and start"
    )
    return errors, [notice] if told else []


def given_config(folder: str) -> dict[str, Any]:
    """adapter_config.json of a local folder; empty for a name on the Hub or a file that is wrong, which
    loading names."""
    try:
        with open(os.path.join(os.path.expanduser(folder), "adapter_config.json"), encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _same(written: Any, stored: Any) -> bool:
    if not written and not stored:  # null, false, [] and {} are one thing
        return True
    if isinstance(written, list) and isinstance(stored, list):
        return sorted(map(str, written)) == sorted(map(str, stored))
    if isinstance(written, str) and isinstance(stored, list):
        return [written] == stored
    return bool(written == stored)
