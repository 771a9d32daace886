"""`streaming: true`: what cannot be known of a stream."""

from __future__ import annotations

from collections.abc import Iterable

from monograph.recipe.config.trl_choose import SFT
from monograph.recipe.config.trl_keys import TrlRecipe


def check_stream(recipe: TrlRecipe) -> Iterable[str]:
    """What cannot be known of a stream."""
    if not recipe.streaming:
        return
    if recipe.method_name != SFT:
        yield f"streaming: it is for documents, and rl is {recipe.rl}; leave it out"
    if not recipe.max_steps:
        yield "streaming: the length of a stream is not known; write max_steps"
    if recipe.val_set_size:
        yield "streaming and val_set_size: nothing can be held back of a stream; write test_datasets"
    for name in ("sample_packing", "group_by_length"):
        if getattr(recipe, name):
            yield f"streaming and {name}, which looks at all rows; leave one out"
