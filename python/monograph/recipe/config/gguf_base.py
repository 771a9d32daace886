"""A GGUF file as base_model: what goes with it."""

from __future__ import annotations

import os
from typing import Any

from monograph.ops.read_gguf import is_gguf
from monograph.recipe.config.key_row import Said, concerns
from monograph.recipe.config.keys import Recipe, TrlRecipe


@concerns("base_model merge_lora serve_with adapter")
def check_gguf(recipe: Recipe, said: Said) -> None:
    """A GGUF file is written again by `monograph merge` alone; llama.cpp alone runs it."""
    if not is_gguf(os.path.expanduser(recipe.base_model)):
        return
    file = f"base_model is the GGUF file {recipe.base_model}"
    if recipe.merge_lora:
        said.errors.append(
            f"merge_lora: {file}; leave it out, and after training: monograph merge with the recipe, or "
            "serve_with: llama.cpp for the adapter apart"
        )
    if recipe.serve_with not in (None, "llama.cpp"):
        said.errors.append(f"serve_with: {file}, which {recipe.serve_with} does not run; write llama.cpp")
    if recipe.adapter is None and isinstance(recipe, TrlRecipe):
        said.errors.append(f"adapter: missing; {file}, whose weights stay frozen: write adapter: qlora")


def config_of_gguf(file: str) -> dict[str, Any]:
    """What config.json of its folder would say of quantisation; empty for a file that loading refuses."""
    from monograph.hf.transformers.gguf_folder import gguf_folder
    from monograph.hf.transformers.loading import stored_quantization

    try:
        stored = stored_quantization(gguf_folder(file))
    except (OSError, ValueError):
        return {}
    return {} if stored is None else {"quantization_config": stored}
