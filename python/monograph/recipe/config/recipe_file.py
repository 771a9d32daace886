"""Where a recipe lies: a YAML file, or recipe.yml in the folder of a run."""

from __future__ import annotations

import os
import re

NAME = "recipe.yml"


def recipe_file(path: str) -> str:
    """The file that a command is given: itself, or recipe.yml of a folder that has one."""
    inside = os.path.join(path, NAME)
    if os.path.isdir(path) and not os.path.isfile(inside):
        raise ValueError(
            f"this is a folder without {NAME}; wanted CONFIG.yml, or the output_dir of a finished run"
        )
    return inside if os.path.isdir(path) else path


def folder_of_run(folder: str) -> str:
    """The output_dir that the folder of an adapter is, or that holds it as a checkpoint."""
    parent, name = os.path.split(os.path.normpath(folder))
    return (parent or ".") if re.fullmatch(r"checkpoint-\d+", name) else folder
