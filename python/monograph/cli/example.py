"""`python -m monograph example FOLDER`: a small model, data and a recipe to try; nothing is downloaded."""

from __future__ import annotations

import json
import sys

from monograph.cli.command_parser import CommandParser, say_next


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _keep_silent(text: str) -> None:
    """Under --quiet."""


def run(arguments: list[str]) -> int:
    parser = CommandParser("example", __doc__)
    parser.add_argument("folder", metavar="FOLDER", help="where to put it")
    options = parser.parse_args(arguments)

    from monograph.recipe.run.example import write_example

    try:
        path = write_example(options.folder, _keep_silent if options.quiet else _say)
    except OSError as error:
        print(f"error: {options.folder}: {error.strerror or error}", file=sys.stderr)
        return 3
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    if options.json:
        print(json.dumps({"schema_version": 1, "recipe": str(path)}))
    elif not options.quiet:
        print(f"wrote {options.folder}: a small model, data and recipe.yml")
    say_next(options, "python", "-m", "monograph", "train", str(path))
    return 0
