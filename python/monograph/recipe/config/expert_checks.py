"""Checks of keys together: what does not go with experts that are spread over ranks."""

from __future__ import annotations

from monograph.recipe.config.key_row import Said, concerns
from monograph.recipe.config.keys import Recipe
from monograph.recipe.config.placement import device_type


@concerns("expert_parallel_size device device_map base_memory calibration")
def check_expert_parallel(recipe: Recipe, said: Said) -> None:
    if (recipe.expert_parallel_size or 1) == 1:
        return
    if (kind := device_type(recipe)) != "cpu":
        said.errors.append(
            f"device is {kind}, and experts are spread over ranks on the CPU only; leave "
            "expert_parallel_size out"
        )
    if recipe.base_memory is not None:
        said.errors.append(
            "base_memory and expert_parallel_size: a rank holds its experts in memory already; write one of "
            "the two"
        )
    if recipe.calibration:
        said.errors.append(
            "calibration and expert_parallel_size: what experts are given is not seen where they are spread; "
            "leave calibration out and run monograph.calibrate on one process"
        )
