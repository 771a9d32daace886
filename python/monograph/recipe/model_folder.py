"""Where the base of a recipe lies."""

from __future__ import annotations

import os

from monograph.recipe.keys import Recipe


def model_folder(recipe: Recipe) -> str:
    """The folder of the base; a name on the Hub is downloaded once by its library."""
    folder = os.path.expanduser(recipe.base_model)
    if os.path.isdir(folder):
        return folder
    from huggingface_hub import snapshot_download

    return snapshot_download(
        recipe.base_model, revision=recipe.revision_of_model, ignore_patterns=["*.bin", "*.pth", "original/*"]
    )
