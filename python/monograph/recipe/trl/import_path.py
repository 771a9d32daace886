"""Functions and classes of the user's by dotted name: rewards, transforms of datasets, callbacks."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from monograph.recipe.config.keys import TrlRecipe
from monograph.recipe.config.trl_arguments import REWARD_FUNCS


def import_path(name: str, key: str) -> Any:
    """What `package.module.name` is; modules are found as by `import`, also in the working folder."""
    module, _, last = name.rpartition(".")
    if not module:
        raise ValueError(f"{key}: {name!r} is no dotted name; wanted module.function")
    if os.getcwd() not in sys.path:  # `python -m` has it there, another way to start Python has not
        sys.path.append(os.getcwd())
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # a module that it imports itself
        raise ValueError(
            f"{key}: there is no module {error.name} (for {name}) in {os.getcwd()} or what is installed"
        ) from error
    if not hasattr(found, last):
        raise ValueError(f"{key}: {module} ({found.__file__}) has no {last}")
    return getattr(found, last)


def reward_functions(recipe: TrlRecipe) -> list[Callable[..., Any] | str]:
    """`trl.reward_funcs`: functions, and folders of models that give a reward."""
    written = recipe.trl.get(REWARD_FUNCS) or []
    key = f"trl.{REWARD_FUNCS}"
    names = [written] if isinstance(written, str) else written
    found: list[Callable[..., Any] | str] = []
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f"{key}: {name!r} is no text; wanted module.function")
        if os.path.isfile(os.path.join(os.path.expanduser(name), "config.json")):
            found.append(os.path.expanduser(name))
            continue
        function = import_path(name, key)
        if not callable(function):
            raise ValueError(f"{key}: {name} is {type(function).__name__}, wanted a function")
        parameters = inspect.signature(function).parameters
        takes_any = any(entry.kind is entry.VAR_KEYWORD for entry in parameters.values())
        if "completions" not in parameters and not takes_any:
            raise ValueError(
                f"{key}: {name}({', '.join(parameters)}) takes no completions; wanted "
                f"{name.rpartition('.')[2]}(completions, **columns)"
            )
        found.append(function)
    return found


def callback_classes(recipe: TrlRecipe) -> list[Any]:
    """`callbacks`: classes of transformers' TrainerCallback."""
    from transformers import TrainerCallback

    found = []
    for name in recipe.callbacks or []:
        made = import_path(name, "callbacks")
        if not (isinstance(made, type) and issubclass(made, TrainerCallback)):
            raise ValueError(
                f"callbacks: {name} is {made!r}, wanted a class of transformers' TrainerCallback"
            )
        found.append(made)
    return found
