"""Files of documents to tokens and labels on disk, under a name that says what they came from."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from monograph.packing.collator import IGNORED
from monograph.recipe.config.data_files import files_taken, load_rows
from monograph.recipe.config.dataset_errors import naming_files
from monograph.recipe.config.keys import DatasetKeys, Recipe
from monograph.recipe.data.chat_template import written_template
from monograph.recipe.data.documents import document_reader
from monograph.recipe.data.encode import Encoded, encode, fit
from monograph.recipe.data.full_disk import naming_file

_COUNTS = "counts.json"  # written last
_TOKENS = "tokens.sha256"
_VERSION = 7  # of the prepared files; a change of their meaning raises it

# The keys that change what tokens are prepared; others leave prepared data as it is.
_DATA_KEYS = (
    "datasets test_datasets val_set_size sequence_len excess_length_strategy min_sample_len "
    "train_on_inputs chat_template chat_template_jinja chat_template_kwargs "
    "default_system_message eot_tokens special_tokens tokens seed"
)


@dataclass
class Prepared:
    """Documents as tokens and labels: datasets with columns `input_ids` and `labels`."""

    train: Any
    eval: Any | None
    counts: dict[str, int]
    folder: str
    tokens_sha256: str  # of the ids and labels that are trained on, document by document

    def what_is_missing(self) -> str:
        """One line on rows that are not there, or not whole; empty if all are."""
        found = [
            f"{self.counts[name]:,} {name}" for name in (*_STATUS[1:], *_CUT[1:]) if self.counts.get(name)
        ]
        return f"of {self.counts['rows']:,} rows: {', '.join(found)}" if found else ""


def data_keys(recipe: Recipe) -> dict[str, Any]:
    """The keys that prepared data depend on; of a template in a file, its contents."""
    keys = {name: value for name, value in asdict(recipe).items() if name in _DATA_KEYS.split()}
    return keys | {"chat_template_jinja": written_template(recipe)}


def data_hash(recipe: Recipe, tokenizer: Any) -> str:
    """A name for the prepared data: all they depend on, the bytes of files and tokenizer included."""
    digest = hashlib.sha256()
    keys = data_keys(recipe)
    template = tokenizer.chat_template
    parts = [
        _VERSION,
        keys,
        tokenizer.backend_tokenizer.to_str(),
        template,
        str(tokenizer.special_tokens_map),
    ]
    digest.update(json.dumps(parts, sort_keys=True, default=str).encode())
    digest.update(files_sha256([*recipe.datasets, *recipe.test_datasets]).encode())
    return digest.hexdigest()[:16]


def files_sha256(datasets: Sequence[DatasetKeys]) -> str:
    """A hash of the bytes of all local files of these datasets, whatever their names, and of Hub names."""
    digest = hashlib.sha256()
    for dataset in datasets:
        files = files_taken(dataset)
        if files is None:
            named = (dataset.path, dataset.name, dataset.revision, dataset.data_files)
            digest.update(" ".join(map(str, named if dataset.data_files else named[:3])).encode())
        for name in files or []:
            with open(name, "rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
    return digest.hexdigest()


# What became of a piece of a row; a column while preparing.
_KEPT, _TOO_LONG, _TOO_SHORT, _NO_TARGET = range(4)
_STATUS = ("kept", "too long", "too short", "without a target")
# The same for a row that was too long and is there yet; a column, not 0 at the first piece of such a row.
_CUT = ("", "truncated", "split into pieces")
# Columns that are there while documents are chosen; tokens: of the whole row.
_NOT_KEPT = ("status", "cut", "tokens")
_CUT_BY = {"truncate": 1, "split": 2}


class _Encoder:
    """Rows of one dataset to columns, a batch at a time; may be sent to other processes."""

    def __init__(self, recipe: Recipe, entry: DatasetKeys, where: str, tokenizer: Any) -> None:
        self._where = f"{where} {entry.path}"
        self._read = document_reader(recipe, entry, tokenizer)
        self._tokenizer, self._recipe = tokenizer, recipe
        self._strategy = recipe.excess_length_strategy or ("split" if entry.type == "completion" else "drop")

    def _status(self, piece: Encoded) -> int:
        if len(piece.input_ids) < (self._recipe.min_sample_len or 1):
            return _TOO_SHORT
        # The first token of a document is predicted by nothing.
        return _NO_TARGET if all(label == IGNORED for label in piece.labels[1:]) else _KEPT

    def __call__(self, batch: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {name: [] for name in ("input_ids", "labels", *_NOT_KEPT)}
        length, strategy = self._recipe.sequence_len, self._strategy
        for index, number in enumerate(numbers):
            row = {name: values[index] for name, values in batch.items()}
            row_name = f"{self._where} row {number}"
            try:
                whole = encode(self._read(row, row_name), self._tokenizer)
                pieces = fit(whole, length, strategy)
            except ValueError as error:
                raise ValueError(f"{row_name}: {str(error).removeprefix(row_name + ': ')}") from error
            found = [(piece, self._status(piece)) for piece in pieces] or [(Encoded([], []), _TOO_LONG)]
            cut = bool(pieces) and len(whole.input_ids) > length
            for part, (piece, status) in enumerate(found):
                columns["input_ids"].append(piece.input_ids if status == _KEPT else [])
                columns["labels"].append(piece.labels if status == _KEPT else [])
                columns["status"].append(status)
                columns["tokens"].append(len(whole.input_ids))
                columns["cut"].append(_CUT_BY[strategy] if cut and not part else 0)
        return columns


def _dataset(recipe: Recipe, where: str, tokenizer: Any, counts: Counter[str], scratch: str) -> Any:
    """All documents of `datasets` or `test_datasets`, encoded; `scratch` holds files until they are saved."""
    from datasets import concatenate_datasets

    parts, found, too_long = [], Counter[str](), list[int]()
    for number, entry in enumerate(getattr(recipe, where)):
        rows = load_rows(entry, f"{where}.{number}")
        counts["rows"] += len(rows)
        # JSON that is not UTF-8 is read as it is, and decoded here.
        with naming_files(
            f"{where}.{number}", entry.path, files_taken(entry), "json", only=UnicodeDecodeError
        ):
            encoded = rows.map(
                _Encoder(recipe, entry, f"{where}.{number}", tokenizer),
                batched=True,
                with_indices=True,
                remove_columns=rows.column_names,
                features=_features(),
                num_proc=recipe.dataset_processes,
                load_from_cache_file=False,
                cache_file_name=os.path.join(scratch, f"{where}.{number}.arrow"),
                new_fingerprint=hashlib.sha256(f"{scratch} {where} {number}".encode()).hexdigest()[:16],
                desc=f"tokenising {entry.path}",
            )
        status = encoded["status"][:]
        found.update(_STATUS[value] for value in status)
        counts.update(_CUT[value] for value in encoded["cut"][:] if value)
        lengths = zip(status, encoded["tokens"][:], strict=True)
        too_long += [tokens for value, tokens in lengths if value == _TOO_LONG]
        kept = [number for number, value in enumerate(status) if value == _KEPT]
        parts.append(encoded.select(kept).remove_columns(list(_NOT_KEPT)))
    counts.update(found)
    if not found["kept"]:
        raise ValueError(f"{where}: no document is left: {_why_empty(found)}{_how_long(recipe, too_long)}")
    return concatenate_datasets(parts)


def encoded_stream(recipe: Recipe, entry: DatasetKeys, where: str, tokenizer: Any) -> Any:
    """Documents of one dataset as they are read, encoded; those that are not kept are passed over."""
    rows = load_rows(entry, where, streaming=True)
    encoded = rows.map(
        _Encoder(recipe, entry, where, tokenizer),
        batched=True,
        with_indices=True,
        remove_columns=rows.column_names,
        features=_features(),
    )
    return encoded.filter(_is_kept).remove_columns(list(_NOT_KEPT))


def _is_kept(row: dict[str, Any]) -> bool:
    return bool(row["status"] == _KEPT)


def _features() -> Any:
    from datasets import Features, List, Value

    tokens = List(Value("int32"))
    small = {"status": Value("int8"), "cut": Value("int8"), "tokens": Value("int32")}
    return Features({"input_ids": tokens, "labels": tokens, **small})


def _why_empty(found: Counter[str]) -> str:
    if found.keys() == {"without a target"}:
        return (
            f"all labels are {IGNORED} in all {found.total()} documents, so there is nothing to learn; look "
            "with `preprocess --debug`: is the type of the dataset right?"
        )
    return ", ".join(f"{count} {name}" for name, count in found.items()) or "the files are empty"


def _how_long(recipe: Recipe, too_long: Sequence[int]) -> str:
    """The least length of documents that are too long, and what to do."""
    if not too_long:
        return ""
    shortest = "it has" if len(too_long) == 1 else "the shortest has"
    return (
        f"; {shortest} {min(too_long):,} tokens, sequence_len is {recipe.sequence_len:,}: raise it, or write "
        "excess_length_strategy: truncate or split"
    )


def split_rows(recipe: Recipe, documents: Any) -> tuple[Any, Any]:
    """Training and evaluation documents; which is which is a function of seed and number."""
    size = recipe.val_set_size
    count = int(size) if size >= 1 else max(1, round(len(documents) * size))
    if count >= len(documents):
        raise ValueError(
            f"val_set_size is {size}: {count} of {len(documents)} documents would be held back; leave some"
        )
    order = sorted(
        range(len(documents)), key=lambda number: hashlib.sha256(f"{recipe.seed}:{number}".encode()).digest()
    )
    return documents.select(sorted(order[count:])), documents.select(sorted(order[:count]))


def prepare(recipe: Recipe, tokenizer: Any) -> Prepared:
    """The prepared data of a recipe, from disk if they are there."""
    root = os.path.expanduser(recipe.dataset_prepared_path or "last_run_prepared")
    if os.path.exists(root) and not os.path.isdir(root):
        raise ValueError(f"dataset_prepared_path: {root} is a file, wanted a folder")
    folder = os.path.join(root, data_hash(recipe, tokenizer))
    if not os.path.isfile(os.path.join(folder, _COUNTS)):
        _write(recipe, tokenizer, folder)
    return read_prepared(folder)


def read_prepared(folder: str) -> Prepared:
    """What is in a folder of prepared data, which another process may have made."""
    from datasets import load_from_disk

    counts_file = os.path.join(folder, _COUNTS)
    if not os.path.isfile(counts_file):
        raise ValueError(
            f"dataset_prepared_path: {folder} was prepared by rank 0 and is not seen here; wanted a folder "
            "that all ranks see"
        )
    with open(counts_file, encoding="utf-8") as file:
        counts = json.load(file)
    with open(os.path.join(folder, _TOKENS), encoding="ascii") as file:
        tokens = file.read()
    held = os.path.join(folder, "eval")
    return Prepared(
        load_from_disk(os.path.join(folder, "train")),
        load_from_disk(held) if os.path.isdir(held) else None,
        counts,
        folder,
        tokens,
    )


def _write(recipe: Recipe, tokenizer: Any, folder: str) -> None:
    unfinished = f"{folder}.{uuid.uuid4().hex[:8]}"  # the same process number may run on another host
    with naming_file(folder, "dataset_prepared_path"):
        try:
            _write_into(unfinished, recipe, tokenizer)
            _rename_unless_there(unfinished, folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _write_into(unfinished: str, recipe: Recipe, tokenizer: Any) -> None:
    scratch = os.path.join(unfinished, "scratch")
    os.makedirs(scratch)
    counts: Counter[str] = Counter()
    train, held = _dataset(recipe, "datasets", tokenizer, counts, scratch), None
    if recipe.test_datasets:
        held = _dataset(recipe, "test_datasets", tokenizer, counts, scratch)
    elif recipe.val_set_size:
        train, held = split_rows(recipe, train)
    digest = hashlib.sha256()
    for name, part in (("train", train), ("eval", held)):
        if part is not None:
            part.save_to_disk(os.path.join(unfinished, name))
            counts[f"{name} documents"] = len(part)
            for batch in part.iter(1000):
                if name == "train":
                    _add_tokens(digest, batch)
                counts[f"{name} tokens"] += sum(map(len, batch["input_ids"]))
                counts[f"{name} targets"] += sum(
                    label != IGNORED for labels in batch["labels"] for label in labels[1:]
                )
    shutil.rmtree(scratch)
    with open(os.path.join(unfinished, _TOKENS), "w", encoding="ascii") as file:
        file.write(digest.hexdigest())
    with open(os.path.join(unfinished, _COUNTS), "w", encoding="utf-8") as file:
        json.dump(counts, file, indent=1)


def _add_tokens(digest: Any, batch: dict[str, Any]) -> None:
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        digest.update(array("i", [len(ids), *ids, *labels]).tobytes())


def _rename_unless_there(unfinished: str, folder: str) -> None:
    """Whoever looks sees all of it or nothing. Of two runs that prepare the same, the first one's stays: the
    second has the same tokens, and the first may be reading."""
    try:
        os.rename(unfinished, folder)
    except OSError:
        if not os.path.isfile(os.path.join(folder, _COUNTS)):  # of no run: nothing is renamed without it
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(unfinished, folder)
