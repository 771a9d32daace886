"""Values of keys that a trainer of TRL cannot have, by name, with those that it can."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterable
from typing import Any

from monograph.recipe.config.device_keys import written_device
from monograph.recipe.config.streaming_keys import check_stream
from monograph.recipe.config.trl_arguments import config_arguments, field_names
from monograph.recipe.config.trl_choose import REWARD
from monograph.recipe.config.trl_fields import OPTIMIZERS, OWN_OPTIMIZERS, OWN_SCHEDULERS, SCHEDULERS
from monograph.recipe.config.trl_keys import TrlRecipe

STEP_MODES = (None, "graph", "regions", "inductor", "eager")

# Losses of DPOTrainer, and those that know of pairs the wrong way round.
_DPO_LOSSES = """
    sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero apo_down discopop
    sft sigmoid_norm
"""
DPO_LOSSES = tuple(_DPO_LOSSES.split())
SMOOTHED_LOSSES = ("exo_pair", "robust", "aot", "aot_unpaired")


# What the optimizers of transformers need besides it, by the beginnings of their names: package, module.
PACKAGES = {
    "schedule_free": ("schedulefree", "schedulefree"),
    "galore": ("galore-torch", "galore_torch"),
    "apollo": ("apollo-torch", "apollo_torch"),
    "lomo": ("lomo-optim", "lomo_optim"),
    "adalomo": ("lomo-optim", "lomo_optim"),
    "grokadamw": ("grokadamw", "grokadamw"),
    "stable_adamw": ("torch-optimi", "optimi"),
    "adamw_torch_8bit": ("torchao", "torchao"),
    "adamw_torch_4bit": ("torchao", "torchao"),
    "ao_adamw": ("torchao", "torchao"),
}


def check_values(recipe: TrlRecipe, config: Any) -> list[str]:
    """Errors about values; `config` is the class of the trainer's config."""
    errors = [*_check_names(recipe, config), *_check_losses(recipe), *_check_evaluation(recipe, config)]
    if recipe.step_mode not in STEP_MODES:
        known = ", ".join(map(str, STEP_MODES[1:]))
        errors.append(f"step_mode is {recipe.step_mode}, which no trainer of TRL has; wanted {known}")
    try:
        place = written_device(recipe)
    except ValueError:
        place = "cpu"  # check_device says what is wrong
    if place not in ("cpu", "auto"):
        errors.append(f"device is {place}: trainer: trl computes on a CPU; leave it out")
    if recipe.fp16:
        errors.append("fp16: accelerate scales no loss on a CPU; write bf16: true, or leave trainer: trl out")
    if recipe.num_labels not in (None, 1):
        errors.append(f"num_labels is {recipe.num_labels}, wanted 1: a reward is one number")
    if recipe.reward_model and recipe.merge_lora:
        errors.append("merge_lora: a reward model has a head that its base has not; leave it out")
    if recipe.num_labels and recipe.method_name != REWARD:
        errors.append("num_labels: it is for reward_model: true; leave it out")
    per_epoch = [name for name in ("evals_per_epoch", "saves_per_epoch") if (getattr(recipe, name) or 1) > 1]
    if recipe.max_steps and per_epoch:
        errors.append(
            f"{per_epoch[0]} and max_steps: TRL knows shares of all steps alone; write "
            f"{per_epoch[0].split('s_')[0]}_steps"
        )
    if recipe.lr_scheduler == "rex" and recipe.lr_scheduler_kwargs:
        errors.append("lr_scheduler_kwargs: rex has none; write cosine_min_lr_ratio")
    return [*errors, *_check_loraplus(recipe), *check_stream(recipe)]


def _check_loraplus(recipe: TrlRecipe) -> Iterable[str]:
    ratio = recipe.loraplus_lr_ratio
    if ratio is None:
        if recipe.loraplus_lr_embedding is not None:
            yield "loraplus_lr_embedding: loraplus_lr_ratio is missing; write loraplus_lr_ratio: 16"
        return
    if ratio < 1:
        yield f"loraplus_lr_ratio is {ratio}, wanted 1 or more"
    if recipe.optimizer == "muon":
        yield "loraplus_lr_ratio and optimizer muon, whose updates have one size; leave one out"


def _missing_package(optimizer: str) -> Iterable[str]:
    for prefix, (package, module) in PACKAGES.items():
        if optimizer.startswith(prefix) and importlib.util.find_spec(module) is None:
            yield (
                f"optimizer is {optimizer}, which needs {package}: pip install {package}, or write "
                "adamw_torch"
            )


def _check_names(recipe: TrlRecipe, config: Any) -> Iterable[str]:
    """Names of optimizers and schedulers, and entries of `trl` that TRL lists the choices of."""
    from transformers import SchedulerType

    from monograph.upstream.transformers_names import OptimizerNames

    optimizers = [*(str(entry.value) for entry in OptimizerNames), *OPTIMIZERS, *OWN_OPTIMIZERS]
    of_transformers = [str(entry.value) for entry in SchedulerType]
    schedulers = [*of_transformers, *SCHEDULERS, *OWN_SCHEDULERS]
    if recipe.optimizer not in optimizers:
        yield f"optimizer is {recipe.optimizer}, wanted one of {', '.join(optimizers)}"
    yield from _missing_package(recipe.optimizer)
    if recipe.lr_scheduler not in schedulers:
        yield f"lr_scheduler is {recipe.lr_scheduler}, wanted one of {', '.join(schedulers)}"
    listed = {entry.name: entry.metadata.get("choices") for entry in dataclasses.fields(config)}
    listed |= {
        "optim": [name for name in optimizers if name not in OWN_OPTIMIZERS | OPTIMIZERS],
        "lr_scheduler_type": of_transformers,
    }
    for name, value in recipe.trl.items():
        choices = listed.get(name)
        if choices and isinstance(value, str) and value not in choices:
            yield f"trl.{name} is {value}, wanted one of {', '.join(map(str, choices))}"


def _check_losses(recipe: TrlRecipe) -> Iterable[str]:
    if recipe.rl != "dpo":
        return
    written = recipe.dpo_loss_type or recipe.trl.get("loss_type") or ["sigmoid"]
    losses = [written] if isinstance(written, str) else written
    if unknown := [loss for loss in losses if loss not in DPO_LOSSES]:
        key = "dpo_loss_type" if recipe.dpo_loss_type else "trl.loss_type"
        yield f"{key} is {unknown[0]}, wanted one of {', '.join(DPO_LOSSES)}"
    weights = recipe.dpo_loss_weights
    if weights is not None and len(weights) != len(losses):
        yield f"dpo_loss_weights has {len(weights)} numbers for {len(losses)} losses of dpo_loss_type"
    if recipe.dpo_label_smoothing and not set(losses) & set(SMOOTHED_LOSSES):
        yield (
            f"dpo_label_smoothing: the loss {', '.join(losses)} does not use it; write dpo_loss_type: robust "
            f"({', '.join(SMOOTHED_LOSSES)} use it), or leave it out"
        )


def _check_evaluation(recipe: TrlRecipe, config: Any) -> Iterable[str]:
    """What goes by an evaluation wants one."""
    if config_arguments(recipe, field_names(config))["eval_strategy"] not in ("no", False):
        return
    asked = {
        "lr_scheduler is reduce_lr_on_plateau": recipe.lr_scheduler == "reduce_lr_on_plateau",
        "load_best_model_at_end": recipe.load_best_model_at_end,
        "early_stopping_patience": recipe.early_stopping_patience,
    }
    for what, wanted in asked.items():
        if wanted:
            yield f"{what}: nothing is evaluated; write val_set_size: 0.05 and evals_per_epoch: 1"
