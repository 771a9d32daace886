"""Draws how the documents of a file pack into rows, and prints what packing gains.

    python -m monograph.packing train.jsonl --capacity 4096
    python -m monograph.packing lengths.txt --capacity 2048 --strategy first_fit --out grid.png

FILE holds one document per line: JSON with "input_ids" or "length" (.jsonl, .json), else a plain number, its
length in tokens.
"""

from __future__ import annotations

import argparse
import json
import sys

from monograph.ops.pack import OVERLONG, STRATEGIES
from monograph.packing.packed_rows import PackedRows, pack
from monograph.packing.picture import draw_rows, measure_efficiency, text_picture


def _length(line: str, where: str) -> int:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: {line.strip()[:40]!r} is neither a number nor JSON") from error
    if isinstance(value, dict):
        if "input_ids" in value:
            return len(value["input_ids"])
        value = value.get("length")
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f'{where}: wanted a whole number, or an object with "input_ids" or "length"')
    return value


def read_lengths(path: str) -> list[int]:
    """The length of each document in a file with one document per line."""
    with open(path, encoding="utf-8") as lines:
        return [_length(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]


def _summary(rows: PackedRows) -> str:
    documents = int((rows.lengths > 0).sum())
    lost = int(rows.lengths.sum()) - rows.tokens
    text = f"{documents} documents, {rows.tokens} tokens in {len(rows)} rows of {rows.capacity}"
    return text + (f"; {lost} tokens of overlong documents were cut off" if lost else "")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m monograph.packing", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("file", metavar="FILE", help="documents or lengths, one per line")
    parser.add_argument("--capacity", type=int, default=4096, help="tokens of a row (4096)")
    parser.add_argument("--strategy", choices=STRATEGIES, default="best_fit_decreasing")
    parser.add_argument(
        "--overlong", choices=OVERLONG, default="truncate", help="documents longer than a row"
    )
    parser.add_argument("--max-documents", type=int, metavar="N", help="the most documents in a row")
    parser.add_argument("--batch-size", type=int, default=8, help="of the padded batches compared with (8)")
    parser.add_argument("--rows", type=int, default=24, help="rows shown, evenly spread (24)")
    parser.add_argument(
        "--out", metavar="PICTURE", help="draw to this file (png, svg, pdf); needs matplotlib"
    )
    options = parser.parse_args(arguments)
    try:
        rows = pack(
            read_lengths(options.file),
            options.capacity,
            strategy=options.strategy,
            overlong=options.overlong,
            max_documents=options.max_documents,
        )
    except (OSError, UnicodeDecodeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    if options.out:
        draw_rows(rows, options.out, most=options.rows)
        print(f"drawn to {options.out}")
    else:
        print(text_picture(rows, most=options.rows))
    print(_summary(rows))
    print(measure_efficiency(rows, options.batch_size))
    return 0


if __name__ == "__main__":
    sys.exit(main())
