"""Names in the keys of an adapter that the model has not: PEFT passes over them, here they are said."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any

from monograph.recipe.config.keys import Recipe

_log = logging.getLogger("monograph")


def _ends_with(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _innermost(module: Any) -> Any:
    """What PEFT's wrappers, one around the other for several parameters of a module, are around."""
    while (inner := getattr(module, "base_layer", None)) is not None:
        module = inner
    return module


def _has_parameter(modules: dict[str, Any], name: str) -> bool:
    owner, _, last = name.rpartition(".")
    return any(
        _ends_with(path, owner) and hasattr(_innermost(module), last) for path, module in modules.items()
    )


def _adapted(model: Any) -> list[str]:
    """Paths of the layers that have a LoRA part, as in the base."""
    base = model.get_base_model()
    return [path for path, module in base.named_modules() if hasattr(module, "lora_A")]


def _wrong(recipe: Recipe, model: Any) -> Iterable[str]:
    modules = dict(model.get_base_model().named_modules())
    for name in recipe.lora_modules_to_save or []:
        if not any(_ends_with(path, name) for path in modules):
            yield f"lora_modules_to_save: no layer is named {name!r}"
    parameters = recipe.lora_target_parameters or []
    for name in [parameters] if isinstance(parameters, str) else parameters:
        if not _has_parameter(modules, name):
            yield f"lora_target_parameters: no weight is named {name!r}"
    adapted = _adapted(model)
    for key in ("lora_rank_pattern", "lora_alpha_pattern"):
        for pattern in getattr(recipe, key):
            if not any(re.match(rf"(.*\.)?({pattern})$", path) for path in adapted):
                yield f"{key}: no adapted layer matches {pattern!r}"


def check_names(recipe: Recipe, model: Any) -> None:
    """ValueError for a name that nothing has; a warning for one among several lora_target_modules."""
    if recipe.lora_model_dir:
        return  # the adapter there says what is adapted
    if wrong := list(_wrong(recipe, model)):
        some = ", ".join(_adapted(model)[:3])
        raise ValueError(f"{wrong[0]}, so it would do nothing; wanted names of the model, such as {some}")
    names = recipe.lora_target_modules
    for name in names if isinstance(names, list) else []:
        if not any(_ends_with(path, name) for path in _adapted(model)):
            _log.warning("monograph: lora_target_modules: no layer is named %r; the others are adapted", name)
