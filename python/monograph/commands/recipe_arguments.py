"""What the commands that take a recipe share: CONFIG.yml, `--key value` over it, notices, errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from monograph.recipe import ConfigError, Recipe, read_config


def run_recipe(
    parser: argparse.ArgumentParser, arguments: list[str], work: Callable[[Recipe, argparse.Namespace], int]
) -> int:
    """Reads the recipe and does the work; mistakes in recipe or data become messages and exit codes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "config",
        metavar="CONFIG.yml",
        help="the recipe (docs/recipe.md lists its keys), or the folder of an adapter that it made",
    )
    parser.epilog = (
        "Any key of the recipe may follow as --key value: --lora-r 8 --datasets.0.path train.jsonl"
    )
    options, overrides = parser.parse_known_args(arguments)
    try:
        read = read_config(options.config, overrides)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    for notice in read.notices:
        print(f"note: {notice}", file=sys.stderr)
    try:
        return work(read.recipe, options)
    except (ValueError, OSError) as error:  # OSError: also what transformers and the Hub say of a model
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 3
