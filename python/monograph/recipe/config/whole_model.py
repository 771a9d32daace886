"""Runs without an adapter: TRL trains all weights of a dense base, or those of `unfrozen_parameters`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any

from monograph.recipe.config.keys import Recipe

_OF_ADAPTERS = ("lora_", "loraplus_", "peft", "bnb_config_kwargs", "merge_lora", "serve_with")
_RANGE = re.compile(r"\[\d*:\d*\]$")


def check_whole_model(recipe: Recipe) -> list[str]:
    """What is wrong with a recipe for TRL that names no adapter, or with unfrozen_parameters beside one."""
    patterns = getattr(recipe, "unfrozen_parameters", None) or []
    if recipe.adapter is not None:
        if patterns:
            return [
                f"unfrozen_parameters and adapter {recipe.adapter}: the base of an adapter stays frozen; "
                "write lora_modules_to_save, or leave adapter out"
            ]
        return []
    return list(_check_whole(recipe, patterns))


def _check_whole(recipe: Recipe, patterns: list[str]) -> Iterable[str]:
    if recipe.rl or recipe.reward_model:
        yield "adapter: missing; preferences and rewards are trained into an adapter: write adapter: qlora"
    for key in _written(recipe):
        if key.startswith(_OF_ADAPTERS):
            yield (
                f"adapter: missing, and {key} is written; write adapter: qlora, or leave {key} out to train "
                "the weights themselves"
            )
    if recipe.load_in_4bit:
        yield "load_in_4bit: packed weights are not trained themselves; write adapter: qlora"
    for pattern in patterns:
        if _RANGE.search(pattern):
            yield (
                f"unfrozen_parameters: {pattern} names a range of rows, wanted whole tensors; write "
                "adapter: lora and peft_trainable_token_indices for rows of the embedding"
            )
            continue
        try:
            compiled_pattern(pattern)
        except re.error as error:
            yield f"unfrozen_parameters: {pattern} is no regular expression: {error}"


def _written(recipe: Recipe) -> Iterable[str]:
    for entry in fields(recipe):
        made: Any = entry.default_factory
        default = entry.default if made is MISSING else made()
        if getattr(recipe, entry.name) != default:
            yield entry.name


def compiled_pattern(pattern: str) -> re.Pattern[str]:
    """As in axolotl a period is a period unless + follows, and a pattern matches from the start of a name."""
    return re.compile(re.sub(r"\.(?!\+)", r"\\.", pattern))
