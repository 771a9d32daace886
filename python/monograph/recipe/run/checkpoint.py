"""Checkpoints: the adapter as PEFT saves it, moments, and the step reached. There wholly, or not at all.

A folder `checkpoint-N` is written under another name, every file of it flushed to the disk, and renamed at
last. So whatever kills a run, a folder of that name is complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from monograph.recipe.config.keys import Recipe
from monograph.recipe.data.full_disk import naming_file
from monograph.recipe.data.new_tokens import save_adapter
from monograph.recipe.run.adapter_card import write_card
from monograph.recipe.run.base_fingerprint import write_base_fingerprint
from monograph.recipe.run.saved_recipe import write_recipe

_NAME = re.compile(r"checkpoint-(\d+)")
_UNFINISHED = ".unfinished-"
STATE, OPTIMIZER = "trainer_state.json", "optimizer.safetensors"


def flush(path: str) -> None:
    """Returns when the file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_folder(folder: str, write: Callable[[str], None]) -> None:
    """`write(path)` fills a folder that appears as `folder` complete, in place of an older one.

    If that fails nothing of it is left; OSError names the folder where the disk is full."""
    parent, name = os.path.split(os.path.abspath(folder))
    os.makedirs(parent, exist_ok=True)
    unfinished = os.path.join(parent, f"{_UNFINISHED}{name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        with naming_file(folder):
            os.mkdir(unfinished)
            write(unfinished)
            for path, _, files in os.walk(unfinished):
                for file in files:
                    flush(os.path.join(path, file))
                flush(path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    if os.path.isdir(folder):  # from before a resumed run: the same bits, or of another run
        shutil.rmtree(folder)
    os.rename(unfinished, folder)
    flush(parent)


def move_into(source: str, target: str) -> None:
    """Moves all that is in `source` into `target`, in place of what has the same names there.

    A file is never missing in between. A folder (`additional_chat_templates` of a tokenizer) cannot be
    renamed over one that has files, so the older one goes first.
    """
    for name in sorted(os.listdir(source)):
        path = os.path.join(target, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        os.replace(os.path.join(source, name), path)
    os.rmdir(source)


def optimizer_file(output_dir: str) -> str:
    """Where the state of an optimizer is written before there is the folder of its checkpoint; what a killed
    run left there is gone."""
    folder = os.path.join(output_dir, f"{_UNFINISHED}optimizer")
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    return os.path.join(folder, OPTIMIZER)


def save_checkpoint(
    recipe: Recipe,
    step: int,
    model: Any,
    optimizer: Mapping[str, torch.Tensor] | str,
    state: Mapping[str, Any],
    base_fingerprint: Mapping[str, Any],
    lines: Sequence[Mapping[str, Any]],
) -> str:
    """Writes checkpoint-`step`; gives its path. optimizer: its state, or the file that has it, which is moved
    there. lines: of metrics.jsonl, for its card."""
    from safetensors.torch import save_file

    def write(folder: str) -> None:
        save_adapter(model, folder)
        if isinstance(optimizer, str):
            os.replace(optimizer, os.path.join(folder, OPTIMIZER))
        else:
            tensors = {name: tensor.cpu() for name, tensor in optimizer.items()}
            save_file(tensors, os.path.join(folder, OPTIMIZER))
        with open(os.path.join(folder, STATE), "w", encoding="utf-8") as file:
            json.dump(state, file, indent=1)
        write_recipe(recipe, folder)
        write_base_fingerprint(base_fingerprint, folder)
        write_card(recipe, folder, base_fingerprint, model.peft_config[model.active_adapter], lines)

    folder = os.path.join(recipe.output_dir, f"checkpoint-{step}")
    write_folder(folder, write)
    return folder


def load_state(folder: str) -> dict[str, Any]:
    """Trainer state of a checkpoint."""
    for name in (STATE, OPTIMIZER):
        if not os.path.isfile(os.path.join(folder, name)):
            raise ValueError(f"resume_from_checkpoint: {folder} has no {name}; wanted a folder checkpoint-N")
    with open(os.path.join(folder, STATE), encoding="utf-8") as file:
        return json.load(file)


def load_checkpoint(folder: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Optimiser state and trainer state of a checkpoint."""
    from safetensors.torch import load_file

    state = load_state(folder)
    return load_file(os.path.join(folder, OPTIMIZER)), state


def checkpoints(output_dir: str) -> dict[int, str]:
    """The complete checkpoints in a folder, by step, in order."""
    names = os.listdir(output_dir) if os.path.isdir(output_dir) else []
    found = {int(match[1]): name for name in names if (match := _NAME.fullmatch(name))}
    return {step: os.path.join(output_dir, found[step]) for step in sorted(found)}


def keep_last(output_dir: str, limit: int | None, best: int | None) -> None:
    """Deletes all but the last `limit` checkpoints and the best, and what a killed run left unfinished."""
    for name in os.listdir(output_dir):
        if name.startswith(_UNFINISHED):
            shutil.rmtree(os.path.join(output_dir, name), ignore_errors=True)
    found = checkpoints(output_dir)
    for step in list(found)[: -limit if limit else 0]:
        if step != best:
            shutil.rmtree(found[step])


def checkpoint_to_resume(output_dir: str, wanted: str | bool | None, auto: bool) -> str | None:
    """The checkpoint that the keys ask for; None to begin anew, which `auto` alone may find right."""
    if isinstance(wanted, str) and wanted != "auto":
        if not os.path.isdir(wanted):
            raise ValueError(f"resume_from_checkpoint: there is no folder {wanted}")
        return wanted
    if not (wanted or auto):
        return None
    found = checkpoints(output_dir)
    if not found and not auto:
        raise ValueError(
            f"resume_from_checkpoint is {wanted if isinstance(wanted, str) else 'true'}, and output_dir "
            f"({output_dir}) has no checkpoint; leave it out to begin anew, or write "
            "auto_resume_from_checkpoints: true, which begins anew where there is none"
        )
    return found[max(found)] if found else None
