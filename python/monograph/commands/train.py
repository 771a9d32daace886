"""`python -m monograph train CONFIG.yml`: an adapter from a model and a file of documents."""

from __future__ import annotations

import argparse

from monograph.commands.recipe_arguments import run_recipe
from monograph.recipe import Recipe


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m monograph train", description=__doc__)
    return run_recipe(parser, arguments, _train)


def _train(recipe: Recipe, options: argparse.Namespace) -> int:
    from monograph.recipe.train import train

    stopped_by = train(recipe).signal
    if stopped_by is None and recipe.merge_lora:
        from monograph.commands import merge, native

        return native.hand_over(merge.native_arguments(recipe))
    return 0 if stopped_by is None else 128 + stopped_by  # as a shell says it: 130 Ctrl-C, 143 SIGTERM
