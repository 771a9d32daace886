"""`python -m monograph sweep-report OUT_DIR`: what the adapters below a folder have learnt, the best first.

OUT_DIR is the output_dir of a recipe with `adapters` or `sweep`. The order is that of the least eval_loss,
of the last loss where nothing was evaluated. A picture of all losses is drawn to OUT_DIR/losses.png.

    python -m monograph sweep-report out
    python -m monograph sweep-report out --json
"""

from __future__ import annotations

import sys

from monograph.cli.command_parser import CommandParser, say_next


def run(arguments: list[str]) -> int:
    parser = CommandParser("sweep-report", __doc__)
    parser.add_argument("folder", metavar="OUT_DIR", help="the output_dir of the recipe")
    options = parser.parse_args(arguments)
    from monograph.recipe.run.sweep_table import as_json, draw, report, table

    try:
        rows = report(options.folder)
        if not rows:
            print(
                f"error: {options.folder} has no adapter's folder with metrics.jsonl, wanted the output_dir "
                "of a recipe with adapters or sweep",
                file=sys.stderr,
            )
            return 3
        plot = draw(options.folder, rows)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)  # which names the file
        return 3
    print(as_json(rows) if options.json else table(rows))
    if not options.quiet and not options.json:
        print(f"losses in {plot}", file=sys.stderr)
    say_next(
        options,
        "python",
        "-m",
        "monograph",
        "generate",
        f"{options.folder}/{rows[0].name}",
        "--prompt",
        "...",
    )
    return 0
