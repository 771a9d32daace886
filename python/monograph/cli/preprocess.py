"""`python -m monograph preprocess CONFIG.yml`: tokens and labels on disk, and a look at them."""

from __future__ import annotations

import argparse
import json
from typing import Any

from monograph.cli.command_parser import CommandParser, say_next
from monograph.cli.recipe_arguments import run_recipe
from monograph.recipe import Recipe
from monograph.recipe.config.keys import TrlRecipe


def run(arguments: list[str]) -> int:
    parser = CommandParser("preprocess", __doc__)
    parser.add_argument("--debug", action="store_true", help="print documents, targets coloured")
    parser.add_argument("--debug-num-examples", type=int, default=5, metavar="N", help="so many; 5")
    parser.add_argument("--tokens", metavar="FILE", help="also write them to a file for `monograph finetune`")
    return run_recipe(parser, arguments, _preprocess, ranks="first")


def _preprocess(recipe: Recipe, options: argparse.Namespace) -> int:
    from rich.console import Console

    from monograph.recipe.config.model_folder import model_folder
    from monograph.recipe.data.encode import load_tokenizer
    from monograph.recipe.data.prepare import prepare
    from monograph.recipe.data.show_labels import show_labels
    from monograph.recipe.data.token_file import write_token_file

    folder = model_folder(recipe)
    tokenizer = load_tokenizer(recipe, folder)
    if isinstance(recipe, TrlRecipe) and recipe.method.rows != "documents":
        if options.tokens:
            raise ValueError(
                "--tokens: TRL tokenises the rows of this recipe itself; wanted one without `rl`"
            )
        return _show_rows(recipe, tokenizer, options)
    prepared = prepare(recipe, tokenizer)
    if options.tokens:
        write_token_file(options.tokens, prepared.train, prepared.tokens_sha256, recipe, tokenizer, folder)
    if options.debug:
        some = prepared.train.select(range(min(options.debug_num_examples, len(prepared.train))))
        show_labels(list(some), tokenizer, Console())
    if options.json:
        print(
            json.dumps({"schema_version": 1, "counts": dict(prepared.counts), "folder": str(prepared.folder)})
        )
    else:
        for name, count in prepared.counts.items():
            print(f"{name:20} {count:>12,}")
        print(f"prepared in {prepared.folder}")
    say_next(options, "python", "-m", "monograph", "train", options.config)
    return 0


def _show_rows(recipe: TrlRecipe, tokenizer: Any, options: argparse.Namespace) -> int:
    """Rows as TRL is given them; it tokenises them itself."""
    from monograph.recipe.trl.datasets import make_datasets

    count = options.debug_num_examples if options.debug else 0
    made = make_datasets(recipe, tokenizer)
    parts = {"train": made.train, "eval": made.eval}
    if options.json:
        counts = {f"{name} rows": len(rows) for name, rows in parts.items() if rows is not None}
        print(json.dumps({"schema_version": 1, "counts": counts, "folder": None}))
        return 0
    for row in made.train.select(range(min(count, len(made.train)))):
        print(json.dumps(row, ensure_ascii=False))
    if made.told:
        print(made.told)
    for name, rows in parts.items():
        if rows is not None:
            print(f"{name + ' rows':20} {len(rows):>12,}")
    say_next(options, "python", "-m", "monograph", "train", options.config)
    return 0
