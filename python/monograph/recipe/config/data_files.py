"""Which files a dataset of a recipe means: by path, data_files, ds_type and split, as `datasets` has them."""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monograph.recipe.config.dataset_errors import naming_files

if TYPE_CHECKING:
    from monograph.recipe.config.dataset_keys import DatasetKeys

# Readers of `datasets`, and the endings of their files. As a `path` such a name means data_files.
READERS: dict[str, tuple[str, ...]] = {
    "json": (".json", ".jsonl"),
    "parquet": (".parquet",),
    "csv": (".csv",),
    "text": (".txt",),
    "arrow": (".arrow",),
}
_ENDINGS = tuple(ending for endings in READERS.values() for ending in endings)
_PACKED = (".gz", ".bz2", ".xz", ".zst")
_SPLIT_NAME = re.compile(r"\s*(\w+(?:\.\w+)*)\s*(\[[^\]]*\])?(?:\([^)]*\))?\s*")


@dataclass(frozen=True)
class LocalFiles:
    """The files of a dataset on this machine. reader: that of `datasets`; splits: name to files."""

    reader: str
    splits: dict[str, list[str]]

    def taken(self, split: str) -> dict[str, list[str]]:
        """The splits that a split of a recipe (`train[:10%]`, `train+test`) is made of."""
        return {name: files for name, files in self.splits.items() if name in split_names(split)}


def split_names(split: str) -> list[str]:
    """The names in `train[:10%]+test`; an empty one where it is no split."""
    found = [_SPLIT_NAME.fullmatch(part) for part in split.split("+")]
    return [match[1] if match else "" for match in found]


def is_reader(path: str) -> bool:
    """Whether a path names a format, whose files data_files names."""
    return path in READERS


def check_files(dataset: DatasetKeys, where: str) -> list[str]:
    """What is wrong with path, data_files, ds_type, name, revision and split together, before any is read."""
    errors = []
    if dataset.ds_type is not None and dataset.ds_type not in READERS:
        errors.append(f"{where}.ds_type is {dataset.ds_type!r}, wanted one of {', '.join(READERS)}")
    if is_reader(dataset.path):
        if not dataset.data_files:
            errors.append(
                f"{where}.path is {dataset.path}, which names a format, and data_files is missing; write "
                "data_files with the files, or a path"
            )
        if dataset.ds_type in READERS and dataset.ds_type != dataset.path:
            errors.append(f"{where}.path is {dataset.path} and ds_type {dataset.ds_type}; leave one out")
    if dataset.split is not None and "" in split_names(dataset.split):
        errors.append(f"{where}.split is {dataset.split!r}, wanted a name, train[:10%] or train+test")
    if _is_local(dataset):
        errors += [
            f"{where}.{name} is for datasets on the Hub, and {dataset.path} is on this machine; leave it out"
            for name in ("name", "revision")
            if getattr(dataset, name)
        ]
        if os.path.isfile(os.path.expanduser(dataset.path)) and dataset.data_files:
            errors.append(
                f"{where}.data_files names files inside a folder, and path is the file {dataset.path}; leave "
                "one out"
            )
    elif dataset.ds_type and not dataset.data_files:
        errors.append(
            f"{where}.ds_type: a dataset on the Hub says itself what its files are; leave it out, or write "
            "data_files"
        )
    return errors


def _is_local(dataset: DatasetKeys) -> bool:
    """Whether a dataset lies, or should lie, on this machine."""
    path = os.path.expanduser(dataset.path)
    named = path.startswith((".", "/", "~")) or path.endswith(_ENDINGS)
    return is_reader(dataset.path) or named or os.path.exists(path)


def _reader_of(name: str) -> str:
    """The reader of a file by its ending, behind which it may be packed; JSON if it says nothing."""
    for ending in _PACKED:
        name = name.removesuffix(ending)
    return next((reader for reader, endings in READERS.items() if name.endswith(endings)), "json")


def _listed(dataset: DatasetKeys) -> list[str]:
    files = [dataset.data_files] if isinstance(dataset.data_files, str) else dataset.data_files
    return list(files or [])


def _named(dataset: DatasetKeys, folder: str, where: str) -> list[str]:
    """The files that data_files names, patterns among them, each in its order."""
    found: list[str] = []
    for part in _listed(dataset):
        pattern = os.path.join(folder, os.path.expanduser(part))
        matching = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not matching:
            raise ValueError(f"{where}.data_files: there is no file {pattern}")
        found += [name for name in matching if name not in found and os.path.isfile(name)]
    return found


def _one_reader(files: list[str], dataset: DatasetKeys, where: str) -> str:
    readers = sorted({_reader_of(name) for name in files})
    if dataset.ds_type:
        return dataset.ds_type
    if len(readers) != 1:
        raise ValueError(f"{where}: {dataset.path} holds {' and '.join(readers)} files; write data_files")
    return readers[0]


def _in_folder(dataset: DatasetKeys, folder: str, where: str) -> dict[str, list[str]]:
    """The splits that `datasets` finds in a folder by the names of its files and folders."""
    from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns

    endings = READERS[dataset.ds_type] if dataset.ds_type in READERS else (*READERS["json"], ".parquet")
    try:
        patterns = get_data_patterns(os.path.abspath(folder))
        found = DataFilesDict.from_patterns(patterns, os.path.abspath(folder), allowed_extensions=[*endings])
    except (EmptyDatasetError, FileNotFoundError):
        found = {}
    splits = {str(split): sorted(map(str, files)) for split, files in found.items() if files}
    if not splits:
        raise ValueError(f"{where}: {folder} has no file that is *{' or *'.join(endings)}")
    return splits


def local_files(dataset: DatasetKeys, where: str = "datasets") -> LocalFiles | None:
    """The files of a dataset by split; None for a name on the Hub. A single file, and files that data_files
    names, are `train`. ValueError if there are none."""
    path = os.path.expanduser(dataset.path)
    if is_reader(dataset.path):
        return LocalFiles(dataset.path, {"train": _named(dataset, "", where)})
    if os.path.isfile(path):
        return LocalFiles(dataset.ds_type or _reader_of(path), {"train": [path]})
    if os.path.isdir(path):
        if dataset.data_files:
            splits = {"train": _named(dataset, path, where)}
        else:
            splits = _in_folder(dataset, path, where)
        every = [name for files in splits.values() for name in files]
        return LocalFiles(_one_reader(every, dataset, where), splits)
    if _is_local(dataset):
        raise ValueError(f"{where}: there is no file {path}")
    return None


def files_taken(dataset: DatasetKeys, where: str = "datasets") -> list[str] | None:
    """The local files that the split of a dataset reads; None for a name on the Hub."""
    found = local_files(dataset, where)
    if found is None:
        return None
    return [name for files in found.taken(dataset.split or "train").values() for name in files]


def load_rows(dataset: DatasetKeys, where: str, *, streaming: bool = False) -> Any:
    """The rows of a dataset, by the `datasets` library; `where` names it in errors."""
    from datasets import load_dataset

    split = dataset.split or "train"
    found = local_files(dataset, where)
    if streaming and "[" in split:
        raise ValueError(f"{where}.split is {split}, and a stream has no slices; write the name alone")
    if found is None:
        with naming_files(where, dataset.path, None, ""):
            rows = load_dataset(**_on_the_hub(dataset), split=split, streaming=streaming)
    else:
        taken = found.taken(split)
        if missing := [name for name in split_names(split) if name not in taken]:
            raise ValueError(
                f"{where}.split is {split}, and {dataset.path} has no {missing[0]}; there is "
                f"{' and '.join(found.splits)}"
            )
        files = [name for names in taken.values() for name in names]
        with naming_files(where, dataset.path, files, found.reader):
            rows = load_dataset(found.reader, data_files=taken, split=split, streaming=streaming)
    if dataset.shards:
        rows = rows.shard(dataset.shards, dataset.shards_idx or 0)
    return rows


def _on_the_hub(dataset: DatasetKeys) -> dict[str, Any]:
    """Arguments of load_dataset. With ds_type the files are read as such, whatever their endings."""
    files = _listed(dataset) or None
    if files and dataset.ds_type:
        version = f"@{dataset.revision}" if dataset.revision else ""
        urls = [f"hf://datasets/{dataset.path}{version}/{name}" for name in files]
        return {"path": dataset.ds_type, "data_files": {"train": urls}}
    return {
        "path": dataset.path,
        "name": dataset.name,
        "data_files": files,
        "revision": dataset.revision,
    }
