"""A recipe as the arguments of TRL's config, by the table of fields."""

from __future__ import annotations

import dataclasses
from typing import Any

from monograph.recipe.config.trl_fields import CONVERTED, FIELDS
from monograph.recipe.config.trl_keys import TrlRecipe

# Entries of `trl` that are no fields.
REWARD_FUNCS = "reward_funcs"
RENAMED = {
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "use_liger_loss": "use_liger_kernel",
}


def field_names(config: Any) -> set[str]:
    """The fields that one may give to a config of TRL."""
    return {entry.name for entry in dataclasses.fields(config) if entry.init}


def config_arguments(recipe: TrlRecipe, names: set[str]) -> dict[str, Any]:
    """What the config is made with; `names` are its fields."""
    given: dict[str, Any] = {}
    for key, name in FIELDS.items():
        value = getattr(recipe, key)
        if value is None or name not in names:
            continue
        value = CONVERTED[key](value, recipe) if key in CONVERTED else value
        if value is not None:
            given[name] = value
    given |= _events(recipe)
    given |= _compilation(recipe)
    given["report_to"] = recipe.trackers() or "none"
    given["use_cpu"] = True
    given["logging_nan_inf_filter"] = False  # a loss that is no number ends the run, and is not hidden
    given.setdefault("gradient_checkpointing_kwargs", {"use_reentrant": False})
    if recipe.chat_template_kwargs and "chat_template_kwargs" in names:
        given["chat_template_kwargs"] = recipe.chat_template_kwargs
    if recipe.hub_model_id:
        given |= {"push_to_hub": True, "hub_private_repo": True}
    if recipe.early_stopping_patience:
        given.setdefault("metric_for_best_model", "loss")  # as load_best_model_at_end would
    given |= recipe.method.fixed
    return given | of_trl(recipe)


def of_trl(recipe: TrlRecipe) -> dict[str, Any]:
    """The entries of `trl` that are fields, by TRL's names of today."""
    entries = {name: value for name, value in recipe.trl.items() if value is not None}
    return {RENAMED.get(name, name): value for name, value in entries.items() if name != REWARD_FUNCS}


def _events(recipe: TrlRecipe) -> dict[str, Any]:
    """When to evaluate and to save; Monograph's own trainer saves once an epoch, too."""
    evaluates = bool(recipe.val_set_size or recipe.test_datasets)
    wanted = {
        "eval_strategy": _strategy(recipe.eval_strategy, recipe.eval_steps, recipe.evals_per_epoch, recipe),
        "save_strategy": _strategy(
            recipe.save_strategy, recipe.save_steps, recipe.saves_per_epoch or 1, recipe
        ),
    }
    return wanted | ({} if evaluates else {"eval_strategy": "no"})


def _strategy(
    written: str | None, steps: int | float | None, per_epoch: int | None, recipe: TrlRecipe
) -> str:
    if written:
        return written
    if steps or (per_epoch or 0) * recipe.num_epochs > 1:
        return "epoch" if per_epoch == 1 and not steps else "steps"
    return "epoch" if per_epoch else "no"


def _compilation(recipe: TrlRecipe) -> dict[str, Any]:
    """What `step_mode` means under a trainer that compiles its model."""
    if recipe.step_mode in ("graph", "regions"):
        return {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    if recipe.step_mode == "inductor" or recipe.wants_inductor:
        return {"torch_compile": True}
    return {}
