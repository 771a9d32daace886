"""`python -m monograph example FOLDER`: a small model, data and a recipe to try; nothing is downloaded."""

from __future__ import annotations

import argparse
import sys


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m monograph example", description=__doc__)
    parser.add_argument("folder", metavar="FOLDER", help="where to put it")
    options = parser.parse_args(arguments)

    from monograph.recipe.run.example import write_example

    try:
        path = write_example(options.folder)
    except OSError as error:
        print(f"error: {options.folder}: {error.strerror or error}", file=sys.stderr)
        return 3
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    print(f"now: python -m monograph train {path}")
    return 0
