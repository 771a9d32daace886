"""When a run evaluates and saves: eval_strategy and save_strategy beside the numbers of them."""

from __future__ import annotations

from collections.abc import Iterable

from monograph.recipe.config.keys import Recipe


def check_events(recipe: Recipe) -> Iterable[str]:
    """What contradicts, as axolotl has it: a strategy beside other keys of the same thing."""
    evaluates = bool(recipe.val_set_size or recipe.test_datasets)
    for strategy, per_epoch, every in (
        ("eval_strategy", "evals_per_epoch", "eval_steps"),
        ("save_strategy", "saves_per_epoch", "save_steps"),
    ):
        word = getattr(recipe, strategy)
        written = [name for name in (per_epoch, every) if getattr(recipe, name)]
        if word in ("no", "epoch", "best") and written:
            yield (
                f"{strategy} is {word} and {written[0]} {getattr(recipe, written[0])}; leave one of the two "
                "out"
            )
        if word == "steps" and not written:
            yield f"{strategy} is steps, and {every} is missing; write {every}: 500"
        if word not in (None, "no") and strategy == "eval_strategy" and not evaluates:
            yield f"{strategy} is {word}: nothing is evaluated; write val_set_size: 0.05, or leave it out"
    if recipe.save_strategy == "best" and not evaluates:
        yield "save_strategy is best: nothing is evaluated; write val_set_size: 0.05 and evals_per_epoch: 1"
    for name in ("load_best_model_at_end", "save_first_step"):
        if recipe.save_strategy == "no" and getattr(recipe, name):
            yield f"save_strategy is no and {name} true, which wants checkpoints; leave one of the two out"
    if recipe.eval_strategy == "no":
        for name in ("load_best_model_at_end", "early_stopping_patience"):
            if getattr(recipe, name):
                yield f"eval_strategy is no and {name} goes by evaluations; leave one of the two out"
