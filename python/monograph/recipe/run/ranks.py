"""What a recipe asks of its ranks, and what they may say."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping

import torch

from monograph.distributed.tree import Tree
from monograph.distributed.world import World
from monograph.recipe.config.keys import Recipe
from monograph.recipe.config.placement import (
    check_ranks_of_device,
    device_of,
    expert_ranks,
    sharding_of,
)


def check_ranks(recipe: Recipe, world: World) -> None:
    """Refuses what these ranks cannot do."""
    sharding_of(recipe, world.size)
    expert_ranks(recipe, world.size)
    check_ranks_of_device(device_of(recipe), world.size)
    steps = recipe.gradient_accumulation_steps
    if recipe.mode in ("whole_step", "inductor_whole_step") and steps > world.size:
        ranks = f", on {world.size} ranks" if world.size > 1 else ""
        raise ValueError(
            f"step_mode is {recipe.mode}, which holds one forward pass of each rank, and "
            f"gradient_accumulation_steps is {steps}{ranks}; leave step_mode out"
        )


def idle_ranks(recipe: Recipe, world: World) -> str:
    """A line on ranks that have nothing to do; empty if all have."""
    steps, leaves = recipe.gradient_accumulation_steps, recipe.leaves
    idle = [rank for rank in range(world.size) if not Tree(steps, leaves).own(rank, world.size)]
    if not idle:
        return ""
    shards = f" and virtual_shards {leaves}" if leaves != steps else ""
    return (
        f"gradient_accumulation_steps is {steps}{shards}, on {world.size} ranks: {len(idle)} of them have no "
        f"micro-batch in a step ({', '.join(map(str, idle))})"
    )


@contextlib.contextmanager
def quiet_unless_first(world: World) -> Iterator[None]:
    """Rank 0 prints; of the others only errors are printed, by whoever catches them."""
    if world.first:
        yield
        return
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def check_same_start(world: World, step: int, state: Mapping[str, torch.Tensor]) -> None:
    """Refuses ranks that begin at different steps or with different bits: one may see another folder."""
    if world.size == 1:
        return
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    found = world.gathered((step, digest.hexdigest()[:12]))
    if len(set(found)) > 1:
        told = ", ".join(
            f"step {at} with state {hash} on rank {rank}" for rank, (at, hash) in enumerate(found)
        )
        raise ValueError(f"the ranks do not begin alike: {told}; wanted one output_dir that all ranks see")
