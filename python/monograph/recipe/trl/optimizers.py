"""Optimizers and schedules that no name of transformers stands for: put on a trainer before it runs."""

from __future__ import annotations

import math
from typing import Any

from monograph.recipe.config.keys import TrlRecipe
from monograph.recipe.config.trl_arguments import SCHEDULERS
from monograph.recipe.run.schedule import rex


def put_optimizer(recipe: TrlRecipe, trainer: Any) -> None:
    """Muon, or the groups of LoRA+; else the trainer makes its own."""
    if recipe.optimizer == "muon":
        trainer.optimizer = _muon(recipe, trainer.model)
    elif recipe.loraplus_lr_ratio is not None:
        from peft.optimizers import create_loraplus_optimizer

        kind, options = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
        if recipe.loraplus_lr_embedding is not None:
            options = {**options, "loraplus_lr_embedding": recipe.loraplus_lr_embedding}
        trainer.optimizer = create_loraplus_optimizer(
            trainer.model,
            kind,
            loraplus_lr_ratio=recipe.loraplus_lr_ratio,
            loraplus_weight_decay=recipe.weight_decay,
            **options,
        )


def _muon(recipe: TrlRecipe, model: Any) -> Any:
    import torch

    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    for name, value in trained.items():
        if value.ndim != 2:
            raise ValueError(
                f"optimizer is muon, which takes matrices alone, and {name} has {value.ndim} dimensions; "
                "write optimizer: adamw_torch"
            )
    return torch.optim.Muon(trained.values(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)


def put_schedule(recipe: TrlRecipe, trainer: Any) -> None:
    """`rex`, and `wsd`, whose last tenth decays unless num_decay_steps says more."""
    name, options = recipe.lr_scheduler, recipe.lr_scheduler_kwargs or {}
    decays = SCHEDULERS.get(name, name) == "warmup_stable_decay" and "num_decay_steps" not in options
    if name != "rex" and not decays:
        return

    def create_scheduler(num_training_steps: int, optimizer: Any = None) -> Any:
        from torch.optim.lr_scheduler import LambdaLR
        from transformers import get_wsd_schedule

        warmup = trainer.args.get_warmup_steps(num_training_steps)
        optimizer = optimizer or trainer.optimizer
        if decays:
            trainer.lr_scheduler = get_wsd_schedule(
                optimizer,
                warmup,
                math.ceil(num_training_steps / 10),
                num_training_steps,
                **options,
            )
        else:
            least = recipe.cosine_min_lr_ratio or 0.0

            def share(step: int) -> float:
                if step < warmup:
                    return step / warmup
                return rex((step - warmup) / max(1, num_training_steps - warmup), least)

            trainer.lr_scheduler = LambdaLR(optimizer, share)
        return trainer.lr_scheduler

    trainer.create_scheduler = create_scheduler
