"""recipe.yml beside an adapter: the recipe that made it, so that the folder says itself how to use it."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import yaml

from monograph.recipe.config.data_files import is_reader
from monograph.recipe.config.key_row import READ, WRITTEN, rows_of
from monograph.recipe.config.keys import DatasetKeys, Recipe
from monograph.recipe.config.recipe_file import NAME
from monograph.recipe.data.chat_template import written_template

_HEADING = "# The recipe that made this adapter, overrides of the command line included; absolute paths.\n"


def _absolute(path: str) -> str:
    """A path that is there, independent of the folder one stands in; a name on the Hub stays as it is."""
    local = os.path.abspath(os.path.expanduser(path))
    return local if os.path.exists(local) else path


def _absolute_files(entry: dict[str, Any]) -> dict[str, Any]:
    """Path of a dataset, or data_files where the path names their format."""
    if not is_reader(entry["path"]):
        return {"path": _absolute(entry["path"])}
    files = entry["data_files"]
    many = [files] if isinstance(files, str) else files or []
    return {"data_files": [os.path.abspath(os.path.expanduser(name)) for name in many]}


def saved_keys(recipe: Recipe) -> dict[str, Any]:
    """The keys of a recipe that are not at their defaults, as YAML would have them."""
    default = asdict(type(recipe)())
    keys = {name: value for name, value in asdict(recipe).items() if value != default[name]}
    for name, row in rows_of(type(recipe)).items():
        if row.once:
            keys.pop(name, None)
        elif row.path is READ and keys.get(name):
            keys[name] = _absolute(keys[name])
        elif row.path is WRITTEN and name in keys:
            keys[name] = os.path.abspath(os.path.expanduser(keys[name]))
    if recipe.chat_template_jinja:
        keys["chat_template_jinja"] = written_template(recipe)
    plain = asdict(DatasetKeys())
    for name in ("datasets", "test_datasets"):
        if name in keys:
            keys[name] = [
                {key: value for key, value in entry.items() if value != plain.get(key)}
                | _absolute_files(entry)
                for entry in keys[name]
            ]
    return keys


def write_recipe(recipe: Recipe, folder: str) -> None:
    """Writes recipe.yml into the folder of an adapter."""
    with open(os.path.join(folder, NAME), "w", encoding="utf-8") as file:
        file.write(_HEADING)
        yaml.safe_dump(saved_keys(recipe), file, sort_keys=False, allow_unicode=True)


def adapter_folder(folder: str | None) -> str | None:
    """The folder, if it holds an adapter."""
    return folder if folder and os.path.isfile(os.path.join(folder, "adapter_config.json")) else None


def trained_adapter(recipe: Recipe) -> str | None:
    """The adapter that a run of the recipe has written; None if there is none yet. That of lora_model_dir is
    where the run began, and never what it made."""
    return adapter_folder(recipe.output_dir)
