"""`serve_with` of a recipe: after training, the form of the adapter that the server applies.

It lies beside output_dir: outputs/out-vllm, outputs/out-sglang, or the file outputs/out.gguf for llama.cpp;
that of an earlier run is replaced.
"""

from __future__ import annotations

import os
import sys

from monograph.cli import native
from monograph.recipe import Recipe
from monograph.recipe.config.model_checks import features_not_served
from monograph.recipe.run.saved_recipe import trained_adapter


def served_path(recipe: Recipe) -> str:
    folder = os.path.normpath(recipe.output_dir)
    return folder + (".gguf" if recipe.serve_with == "llama.cpp" else f"-{recipe.serve_with}")


def convert(recipe: Recipe, quiet: bool = False) -> int:
    """The exit code of `monograph adapter convert`; 0 where the recipe was told of no such form."""
    from monograph.recipe.config.model_folder import model_folder, stored_path

    if features := features_not_served(recipe):
        print(f"no form for {recipe.serve_with} was written: {', '.join(features)}", file=sys.stderr)
        return 0
    adapter = trained_adapter(recipe)
    if adapter is None or recipe.serve_with is None:
        return 0
    base = stored_path(model_folder(recipe))
    command = ["adapter", "convert", base, adapter, "--for", recipe.serve_with]
    silent = ["--quiet"] if quiet else []
    return native.run_beside([*command, "--out", served_path(recipe), "--force", *silent])
