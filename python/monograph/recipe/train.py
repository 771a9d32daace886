"""A run of a recipe by the engine that it asks for: Monograph's own step, or a trainer of TRL."""

from __future__ import annotations

from monograph.distributed.world import World
from monograph.ops.providers import using
from monograph.recipe.config.keys import Recipe, TrlRecipe
from monograph.recipe.run.outcome import Outcome
from monograph.recipe.run.train import train as train_by_step


def train(recipe: Recipe, world: World | None = None, *, quiet: bool = False) -> Outcome:
    """Runs a recipe to its end, or to the next Ctrl-C or SIGTERM, on the ranks that a launcher started.

    world: ranks that have joined already; nobody watches them. TRL's trainers join by themselves.
    quiet: no bar and no lines; errors are raised as ever.
    """
    with using(recipe.providers):
        if isinstance(recipe, TrlRecipe):
            from monograph.recipe.trl.run import train as train_by_trl  # TRL is imported when it is wanted

            return train_by_trl(recipe, quiet=quiet)
        return train_by_step(recipe, world, quiet=quiet)
