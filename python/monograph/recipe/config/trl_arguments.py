"""A recipe as the arguments of TRL's config, by the rows of its keys; `to_...`: what values become there."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from monograph.recipe.config.key_row import rows_of
from monograph.upstream.untested import mode_on_this_torch

if TYPE_CHECKING:
    from monograph.recipe.config.keys import TrlRecipe

# Entries of `trl` that are no fields.
REWARD_FUNCS = "reward_funcs"
RENAMED = {
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "use_liger_loss": "use_liger_kernel",
}
SCHEDULERS = {"wsd": "warmup_stable_decay"}
# What trl/optimizers.py makes by itself; the config is told a name that it knows.
OWN_SCHEDULERS = {"rex": "constant"}
OWN_OPTIMIZERS = {"muon": "adamw_torch"}
# axolotl's names of torchao's.
OPTIMIZERS = {"ao_adamw_8bit": "adamw_torch_8bit", "ao_adamw_4bit": "adamw_torch_4bit"}


def to_share(per_epoch: int | None, recipe: TrlRecipe) -> float | None:
    """As a share of all steps; None: at the end of each epoch, or not at all."""
    events = (per_epoch or 0) * recipe.num_epochs
    return 1 / events if events > 1 and per_epoch != 1 else None


def to_sampling(_: bool | None, recipe: TrlRecipe) -> str | None:
    if recipe.group_by_length:
        return "group_by_length"
    return None if recipe.shuffle_merged_datasets else "sequential"


def to_scheduler(name: str, recipe: TrlRecipe) -> str:
    name = (SCHEDULERS | OWN_SCHEDULERS).get(name, name)
    return "cosine_with_min_lr" if name == "cosine" and recipe.cosine_min_lr_ratio is not None else name


def to_scheduler_arguments(ratio: float, recipe: TrlRecipe) -> dict[str, float] | None:
    return {"min_lr_rate": ratio} if recipe.lr_scheduler == "cosine" else None


def to_optimizer(name: str, _: TrlRecipe) -> str:
    return (OPTIMIZERS | OWN_OPTIMIZERS).get(name, name)


def to_arguments(given: Any, _: TrlRecipe) -> Any:
    return ",".join(f"{name}={value}" for name, value in given.items()) if isinstance(given, dict) else given


def to_row_length(wanted: bool, recipe: TrlRecipe) -> int | None:
    return recipe.sequence_len if wanted else None


def to_bf16(wanted: bool | str, recipe: TrlRecipe) -> bool:
    return bool(wanted) and wanted != "full" and not recipe.fp16


def to_checkpointing(wanted: bool | str, _: TrlRecipe) -> bool:
    return bool(wanted)


def to_non_reentrant(given: dict[str, Any], _: TrlRecipe) -> dict[str, Any]:
    return {"use_reentrant": False, **given}


def to_compile(wanted: bool | str, _: TrlRecipe) -> bool:
    return wanted is True


def to_trackers(_: Any, recipe: TrlRecipe) -> list[str] | str:
    return recipe.trackers() or "none"


def to_list(given: str | list[str], _: TrlRecipe) -> list[str]:
    return [given] if isinstance(given, str) else given


def field_names(config: Any) -> set[str]:
    """The fields that one may give to a config of TRL."""
    return {entry.name for entry in dataclasses.fields(config) if entry.init}


def config_arguments(recipe: TrlRecipe, names: set[str]) -> dict[str, Any]:
    """What the config is made with; `names` are its fields."""
    given: dict[str, Any] = {}
    for key, row in rows_of(type(recipe)).items():
        value = getattr(recipe, key)
        if value is None or row.trl not in names:
            continue
        value = row.to_trl(value, recipe) if row.to_trl else value
        if value is not None:
            given[str(row.trl)] = value
    given |= _events(recipe)
    given |= _compilation(recipe)
    given["report_to"] = recipe.trackers() or "none"
    given["use_cpu"] = True
    given["logging_nan_inf_filter"] = False  # a NaN loss ends the run, and is not hidden
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
    graph = recipe.step_mode == "graph"
    generated = recipe.step_mode == "inductor" or recipe.wants_inductor
    wanted = "graph" if graph else "inductor" if generated else "eager"
    if mode_on_this_torch(wanted) == "eager":
        return {}
    return {"torch_compile": True} | ({"torch_compile_backend": "aot_eager"} if graph else {})
