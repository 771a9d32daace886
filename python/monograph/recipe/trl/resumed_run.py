"""What defines a run under TRL: recorded in its checkpoints, compared when it is resumed.

transformers goes on from any checkpoint whose tensors fit: with other rows, another base, or a learning rate
that the optimizer of the checkpoint then overrides.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from monograph.recipe.config.keys import KEYS, TRL_KEYS, TrlRecipe
from monograph.recipe.run.run_identity import compare, run_identity

NAME = "monograph_run.json"
_ROWS = "rows of datasets"


def trl_identity(recipe: TrlRecipe) -> dict[str, Any]:
    """The keys that define a run under TRL, those of its trainer included."""
    keys = asdict(recipe)
    names = [name for name, row in KEYS.items() if row.resume.trl]
    names += [name for name, row in TRL_KEYS.items() if row.resume.state != "free"]
    return run_identity(recipe) | json.loads(json.dumps({name: keys[name] for name in names}))


def rows_sha256(rows: Any) -> str:
    """Of the rows as the trainer has them, tokenised and packed or not; empty for a stream."""
    import pyarrow as pa

    if rows is None or not hasattr(rows, "with_format") or not hasattr(rows, "__len__"):
        return ""
    digest = hashlib.sha256()
    for table in rows.with_format("arrow").iter(1000):
        for name in sorted(table.column_names):
            column = table[name].combine_chunks()
            digest.update(name.encode())
            if pa.types.is_list(column.type) and pa.types.is_integer(column.type.value_type):
                digest.update(column.value_lengths().to_numpy(zero_copy_only=False).tobytes())
                digest.update(column.flatten().to_numpy(zero_copy_only=False).tobytes())
            else:
                digest.update(json.dumps(column.to_pylist(), sort_keys=True, default=str).encode())
    return digest.hexdigest()


def with_rows(identity: Mapping[str, Any], rows: Any) -> dict[str, Any]:
    return {**identity, _ROWS: rows_sha256(rows)}


def write_identity(identity: Mapping[str, Any], folder: str) -> None:
    with open(os.path.join(folder, NAME), "w", encoding="utf-8") as file:
        json.dump(identity, file, indent=1)


def compare_run(checkpoint: str | None, identity: Mapping[str, Any]) -> list[str]:
    """Raises if a checkpoint is of another run, and names the key; else gives what is to be told. One of an
    earlier version has no record."""
    path = os.path.join(checkpoint or "", NAME)
    if checkpoint is None or not os.path.isfile(path):
        return []
    with open(path, encoding="utf-8") as file:
        saved = json.load(file)
    rate = "learning_rate"
    if saved.get(rate, identity.get(rate)) != identity.get(rate):
        raise ValueError(
            f"resume_from_checkpoint: {rate} is {identity.get(rate)!r}, and the optimizer of {checkpoint} "
            f"goes on with {saved[rate]!r}; write that, or begin anew in another output_dir"
        )
    return compare(saved, identity, checkpoint)
