"""`python -m monograph preprocess CONFIG.yml`: tokens and labels on disk, and a look at them."""

from __future__ import annotations

import argparse

from monograph.commands.recipe_arguments import run_recipe
from monograph.recipe import Recipe


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m monograph preprocess", description=__doc__)
    parser.add_argument("--debug", action="store_true", help="print documents, targets coloured")
    parser.add_argument("--debug-num-examples", type=int, default=5, metavar="N", help="so many; 5")
    return run_recipe(parser, arguments, _preprocess, ranks="first")


def _preprocess(recipe: Recipe, options: argparse.Namespace) -> int:
    from rich.console import Console

    from monograph.recipe.encode import load_tokenizer
    from monograph.recipe.model_folder import model_folder
    from monograph.recipe.prepare import prepare
    from monograph.recipe.show_labels import show_labels

    tokenizer = load_tokenizer(recipe, model_folder(recipe))
    prepared = prepare(recipe, tokenizer)
    if options.debug:
        some = prepared.train.select(range(min(options.debug_num_examples, len(prepared.train))))
        show_labels(list(some), tokenizer, Console())
    for name, count in prepared.counts.items():
        print(f"{name:20} {count:>12,}")
    print(f"prepared in {prepared.folder}")
    return 0
