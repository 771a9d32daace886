"""Whether an adapter belongs to a base: by the record beside it, as `monograph merge` compares."""

from __future__ import annotations

from typing import Any

from monograph.recipe.config.keys import Recipe
from monograph.recipe.config.model_folder import stored_path
from monograph.recipe.run.base_fingerprint import base_sha256, packing_of, read_base_fingerprint

# Of a packing, what must be equal where the files of two bases differ.
_SAME = ("format", "block", "values_sha256", "experts_sha256")


def check_trained_base(recipe: Recipe, adapter: str, folder: str, model: Any) -> None:
    """Raises if monograph.json of an adapter names another base than this folder and its loaded model: other
    files, and other packed values. Without a record there is nothing to compare; `another_base` allows it."""
    record = read_base_fingerprint(adapter)
    recorded = record.get("base", {})
    if recipe.another_base or not recorded.get("sha256"):
        return
    found = base_sha256(folder, record)
    if found == recorded["sha256"]:
        return
    packed = recorded.get("packed")
    if packed and _same_values(packed, packing_of(model) or {}):
        return
    raise ValueError(
        f"{adapter} was trained on the base with hash {recorded['sha256'][:12]} ({recorded.get('folder')}), "
        f"{stored_path(folder)} has {found[:12]}; write that base as base_model, or --another-base to go on "
        "with this one"
    )


def _same_values(recorded: dict[str, Any], present: dict[str, Any]) -> bool:
    return all(recorded.get(name) == present.get(name) for name in _SAME)
