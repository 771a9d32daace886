"""`streaming: true`: rows are read and tokenised while TRL trains, in the order of the files."""

from __future__ import annotations

from typing import Any

from monograph.recipe.config.keys import TrlRecipe
from monograph.recipe.data.prepare import encoded_stream


def make_stream(recipe: TrlRecipe, tokenizer: Any) -> Any:
    """The documents of `datasets`, one file after the other, as tokens and labels."""
    from datasets import concatenate_datasets

    parts = [
        encoded_stream(recipe, entry, f"datasets.{number}", tokenizer)
        for number, entry in enumerate(recipe.datasets)
    ]
    return concatenate_datasets(parts)
