"""What is wrong with files of data that the `datasets` library could not read: file, line, wanted."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_WANTED = "wanted one JSON object per line"


@contextmanager
def naming_files(
    where: str, path: str, files: Sequence[str] | None, kind: str, only: type[Exception] | None = None
) -> Iterator[None]:
    """Turns errors of reading into a ValueError that names the dataset, the file and what is wanted.

    files: None for a name on the Hub; kind: the reader of `datasets`; only: leaves other errors as they are.
    """
    from datasets.exceptions import DatasetGenerationError

    # StopIteration: an empty JSON file.
    wrong = (only,) if only else (ValueError, StopIteration, DatasetGenerationError)
    logger = logging.getLogger("datasets")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # it would say the same in its own words
    try:
        yield
    except wrong as error:
        found = [reason for name in files or () if (reason := _reason(name, kind))]
        found.sort(key=lambda reason: "has no rows" in reason)  # a broken file says more than an empty one
        said = " ".join(str(error.__cause__ or error).split())
        raise ValueError(f"{where}: {found[0] if found else f'{path}: {said}'}") from error
    finally:
        logger.setLevel(level)


def _reason(name: str, kind: str) -> str:
    """What is wrong with a file; empty if nothing is seen."""
    if os.path.getsize(name) == 0:
        return f"{name} has no rows: it is empty; wanted one or more"
    if kind == "parquet" or (name.endswith(".parquet") and kind == "json"):
        return _parquet(name)
    if kind != "json" or name.endswith((".gz", ".bz2", ".xz", ".zst")):
        return ""  # what `datasets` says is all that is known
    try:
        with open(name, encoding="utf-8-sig") as file:
            first = next((line for line in file if line.strip()), "").strip()
            if not first:
                return f"{name} has no rows: all lines are blank; {_WANTED}"
            file.seek(0)
            # A document of many lines: a list, or an object that is not closed on its first line.
            if not name.endswith(".jsonl") and (first == "{" or first.startswith("[")):
                return _document(name, file.read())
            return _lines(name, file)
    except UnicodeDecodeError as error:
        return f"{name} is not UTF-8 text ({error.reason} at byte {error.start}); {_WANTED}"


def _document(name: str, text: str) -> str:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        return f"{name} line {error.lineno}: {error.msg}; wanted a list of JSON objects"
    return f"{name} has no rows: the list is empty; wanted a list of JSON objects" if rows == [] else ""


def _lines(name: str, lines: Iterator[str]) -> str:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            return f"{name} line {number}: {error.msg} (column {error.colno}); {_WANTED}"
        if not isinstance(row, dict):
            return f"{name} line {number} is {line.strip():.40}; {_WANTED}"
    return ""


def _parquet(name: str) -> str:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        rows = ParquetFile(name).metadata.num_rows
    except (ArrowException, OSError) as error:
        return f"{name} is no Parquet file: {' '.join(str(error).split())}"
    return "" if rows else f"{name} has no rows"
