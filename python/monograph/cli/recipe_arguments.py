"""What the commands that take a recipe share: CONFIG.yml, `--key value` over it, notices, errors."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Literal

from monograph.cli.command_parser import CommandParser
from monograph.ops.providers import using
from monograph.recipe import ConfigError, Recipe, read_config
from monograph.recipe.config.many_recipes import ManyRecipes
from monograph.recipe.data import full_disk


def why_not_several(program: str) -> str:
    """A line if a launcher has started several processes of a command of one; else empty."""
    count = os.environ.get("WORLD_SIZE") or "1"
    if count == "1":
        return ""
    return f"{program} runs in one process, and WORLD_SIZE is {count}; start it without torchrun"


def run_recipe(
    parser: CommandParser,
    arguments: list[str],
    work: Callable[[Recipe, argparse.Namespace], int],
    ranks: Literal["one", "first", "all"] = "one",
    many: Callable[[ManyRecipes, argparse.Namespace], int] | None = None,
) -> int:
    """Reads the recipe and does the work; mistakes in recipe or data become messages and exit codes.

    ranks: who works under a launcher of several processes; "one": nobody, it is refused. many: what is done
    with a recipe of several adapters; None: one of them has to be chosen.
    """
    rank = os.environ.get("RANK") or "0"
    if ranks == "one" and (told := why_not_several(parser.prog)):
        _say(told, rank)
        return 2
    if rank != "0" and ranks == "first":
        return 0
    parser.add_argument(
        "config",
        metavar="CONFIG.yml",
        help="the recipe (docs/reference/keys.md lists its keys), or the folder of an adapter that it made",
    )
    parser.epilog = (
        "Any key of the recipe may follow as --key value: --lora-r 8 --datasets.0.path train.jsonl"
    )
    options, overrides = parser.parse_known_args(arguments)
    try:
        read = read_config(options.config, overrides, many=many is not None)
    except ConfigError as error:
        _say(str(error), rank)
        return 2
    for notice in read.notices if rank == "0" and not options.quiet else ():
        print(f"note: {notice}", file=sys.stderr)
    try:
        with using(read.recipe.providers):
            if read.many is not None and many is not None:
                return many(read.many, options)
            return work(read.recipe, options)
    except ConfigError as error:  # what only a run can look up, as names of callbacks
        _say(str(error), rank)
        return 2
    except (ValueError, OSError) as error:  # OSError: also what transformers and the Hub say of a model
        full = full_disk.reason(error)
        said = error.strerror if full and isinstance(error, OSError) and error.strerror else str(error)
        if full and isinstance(error, OSError) and error.filename:
            said = f"{error.filename}: {said}"
        elif full and os.sep not in said:  # of a descriptor, which has no name
            said += f", while something was written into {read.recipe.output_dir}"
        print(f"error: {' '.join(said.split())}", file=sys.stderr)
        return full_disk.EXIT_CODE if full else 3


def _say(text: str, rank: str) -> None:
    """An error that the ranks of a host have in common: one of them prints it."""
    if rank == "0":
        print(text, file=sys.stderr)
    elif os.environ.get("LOCAL_RANK", rank) == "0":
        print(f"rank {rank}: {text}", file=sys.stderr)
