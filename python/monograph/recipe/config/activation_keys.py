"""The keys of a recipe that say what a step holds of activations."""

from __future__ import annotations

from dataclasses import dataclass

from monograph.recipe.config.key_row import AT_LEAST_1, free, key

_SAME_BITS = free("every division gives the same bits")


@dataclass
class ActivationKeys:
    """Of Monograph's own engine alone."""

    tiled_mlp: bool = key(
        False, "computes the MLP of each layer in slices of tokens: less memory, the same bits", _SAME_BITS
    )
    tiled_mlp_num_shards: int | None = key(
        None, "how many slices; by default slices of 1,024 tokens", _SAME_BITS, limit=AT_LEAST_1
    )
