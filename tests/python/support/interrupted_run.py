"""Kills runs of a recipe at named points with SIGKILL and lets them resume; prints the results as JSON.

    python -m support.interrupted_run ROOT eager|compiled POINT ...

Every run is a fork of this process, so that everything is imported once. One thread: a fork keeps none but
its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

import matplotlib.figure  # noqa: F401  (before the forks)
import torch

from monograph.hf.optimize import optimize  # noqa: F401  (before the forks)
from monograph.recipe import check_keys
from monograph.recipe.run import checkpoint as checkpoint_module
from monograph.recipe.run import train as train_module
from monograph.recipe.run.metrics import read_metrics
from monograph.training import TrainStep
from support.recipe_files import make_model, make_tokenizer, small_recipe, write_jsonl

# Checkpoints 2, 3 (the best, after the first evaluation), 4 and 6; killed in step 3, or in the second save.
STEPS, SAVE_EVERY, KILL_AT = 6, 2, 3


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(function: Any, number: int, *, after: bool = False) -> Any:
    """`function`, at whose call `number` the process dies, before or after the work."""
    calls = 0

    def deadly(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and not after:
            die()
        result = function(*arguments, **options)
        if calls == number:
            die()
        return result

    return deadly


def half_a_file(tensors: Any, path: str | pathlib.Path) -> None:
    """What a killed process may leave of a file."""
    with open(path, "wb") as file:
        file.write(b"\0" * 100)
    die()


def half_loaded(self: TrainStep, state: Any) -> None:
    self.state.flat.fill_(float("nan"))
    die()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    yield
    setattr(owner, name, before)


def _deadly(point: str) -> Any:
    """Where to die: one backward pass a step, one save every second step."""
    from safetensors import torch as safetensors

    grad = torch.autograd.grad
    if point == "before backward":
        return replaced(torch.autograd, "grad", at_call(grad, KILL_AT))
    if point == "after backward":
        return replaced(torch.autograd, "grad", at_call(grad, KILL_AT, after=True))
    if point == "between update and save":
        return replaced(train_module, "save_checkpoint", at_call(checkpoint_module.save_checkpoint, 2))
    if point == "during save, files half written":
        return replaced(safetensors, "save_file", _second_save_is_half(safetensors.save_file))
    if point == "during save, before the rename":
        return replaced(os, "rename", at_call(os.rename, 2))
    return replaced(TrainStep, "load_state_dict", half_loaded)


def _second_save_is_half(save_file: Any) -> Any:
    saves = 0

    def save(tensors: Any, path: str, *arguments: Any, **options: Any) -> Any:
        nonlocal saves
        saves += path.endswith("optimizer.safetensors")
        return half_a_file(tensors, path) if saves == 2 else save_file(tensors, path, *arguments, **options)

    return save


def forked(recipe: Any, point: str | None = None) -> int:
    """Trains in a fork; gives its exit status as a shell does, -9 for SIGKILL."""
    child = os.fork()
    if child == 0:
        with _deadly(point) if point else contextlib.nullcontext():
            train_module.train(recipe)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def report(folder: str | pathlib.Path) -> dict[str, object]:
    lines = read_metrics(os.path.join(folder, "metrics.jsonl"))
    trace = [[line["step"], line.get("loss", 0.0).hex(), line.get("eval_loss", 0.0).hex()] for line in lines]
    with open(os.path.join(folder, "adapter_model.safetensors"), "rb") as file:
        return {"trace": trace, "adapter": hashlib.sha256(file.read()).hexdigest()}


def main(root: pathlib.Path, mode: str, points: list[str]) -> None:
    torch.set_num_threads(1)
    make_tokenizer(root / "model")
    make_model(root / "model", num_hidden_layers=1 if mode == "compiled" else 2)
    rows = [{"instruction": f"What is {n}?", "output": f"{n} dog {n % 7}"} for n in range(60)]
    write_jsonl(root / "train.jsonl", rows)
    keys = small_recipe(
        root,
        "instruction",
        lora_dropout=0.1,
        val_set_size=0 if mode == "compiled" else 10,  # an evaluation is a second graph
        eval_steps=3,
        save_steps=SAVE_EVERY,
        num_epochs=10,
        max_steps=STEPS,
        torch_compile=mode == "compiled",
        auto_resume_from_checkpoints=True,
    )

    def run(name: str, point: str | None = None) -> int:
        recipe = check_keys(keys | {"output_dir": str(root / name)}).recipe
        return forked(recipe, point)

    results = {"whole": {"exits": [run("whole")], **report(root / "whole")}}
    for point in points:
        name = point.replace(" ", "-").replace(",", "")
        # To die while loading there must be something to load.
        exits = [run(name, "after backward")] if point == "during load" else []
        exits.append(run(name, point))
        left = sorted(os.listdir(root / name))
        exits.append(run(name))
        results[point] = {"exits": exits, "left": left, **report(root / name)}
    print(json.dumps(results))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
