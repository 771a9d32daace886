"""Checks of keys together: what a step holds of activations."""

from __future__ import annotations

from monograph.recipe.config.key_row import Said, concerns
from monograph.recipe.config.keys import Recipe
from monograph.recipe.config.placement import device_type, wants_fsdp

# Of token_slices, which wants torch to be imported.
SLICED_MODES = ("graph", "whole_step", "eager")


@concerns("tiled_mlp tiled_mlp_num_shards step_mode torch_compile device shard_size peft_use_dora")
def check_tiled_mlp(recipe: Recipe, said: Said) -> None:
    """Where MLPs can be computed in slices of tokens."""
    errors = said.errors
    if not recipe.tiled_mlp:
        if recipe.tiled_mlp_num_shards is not None:
            errors.append(
                "tiled_mlp_num_shards: tiled_mlp is false, so it would do nothing; write tiled_mlp: true"
            )
        return
    if recipe.mode not in SLICED_MODES:
        wanted = ", ".join(SLICED_MODES)
        errors.append(f"tiled_mlp with step_mode: {recipe.mode}: it generates code; write one of {wanted}")
    if device_type(recipe) != "cpu":
        errors.append(
            f"tiled_mlp with device: {device_type(recipe)}: slices keep their bits on the CPU; leave it out"
        )
    if (recipe.shard_size or 1) > 1 or wants_fsdp(recipe):
        errors.append(
            "tiled_mlp on a sharded base: a layer gathers its weights once; leave one of the two out"
        )
    if recipe.peft_use_dora:
        errors.append(
            "tiled_mlp with peft_use_dora: its magnitude is not summed by slices; leave one of the two out"
        )
