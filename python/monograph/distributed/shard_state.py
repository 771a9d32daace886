"""The state dict of a unit: one entry `shard` in the place of all parameters sharded across ranks."""

from __future__ import annotations

from typing import Any

import torch

from monograph.distributed.layer_bytes import ALIGNMENT, Layout
from monograph.distributed.shard_placeholder import ShardPlaceholder
from monograph.ops.whole_tensors import is_part
from monograph.upstream.torch_names import parameters_of


def give_shard(unit: Any, state_dict: dict[str, Any], prefix: str) -> None:
    """Puts a view of the shard into a state dict: torch's checkpoints load into it in place."""
    from monograph.distributed.shard_rows import shard_rows  # torch.distributed.tensor: a second to import

    for name in _names_away(unit, prefix):
        state_dict.pop(name, None)
    if not unit.shard_holder:
        group, place = unit.shard_spec.group, f"{prefix}shard"
        state_dict[place] = shard_rows(unit.shard, unit.shard_spec.layout, group.rank, group.mesh, place)


@torch.no_grad()
def take_shard(
    unit: Any, state_dict: dict[str, Any], prefix: str, missing: list[str], errors: list[str]
) -> None:
    """Copies the entry into the shard and takes it out. What is away is neither missing nor written to."""
    place = f"{prefix}shard"
    if not unit.shard_holder and place not in state_dict:
        missing.append(place)
    elif not unit.shard_holder:
        rows = _own_rows(state_dict.pop(place), unit.shard_spec.layout, unit.shard_spec.group.rank)
        if isinstance(rows, str):
            errors.append(f"{place} {rows}")
        else:
            unit.shard.view(-1, ALIGNMENT)[: rows.shape[0]].copy_(rows)
    away = _names_away(unit, prefix)
    whole = [name for name in away if name in state_dict]
    if whole:
        errors.append(
            f"{whole[0]} is sharded over {unit.shard_spec.layout.ranks} ranks and was given whole, wanted "
            f"{place} in the place of all of its unit, or monograph.unsharded(model) around load_state_dict"
        )
    state_dict |= away


def _names_away(unit: Any, prefix: str) -> dict[str, ShardPlaceholder]:
    """What stands for the parameters of a unit, by its names in a state dict."""
    found = {}
    for path, name, _ in unit.shard_spec.places:
        away = parameters_of(unit.get_submodule(path)).get(name)
        if isinstance(away, ShardPlaceholder):
            found[prefix + ".".join(part for part in (path, name) if part)] = away
    return found


def _own_rows(given: Any, layout: Layout, rank: int) -> torch.Tensor | str:
    """The rows of a rank, uint8 [own, 16], from what a state dict holds: the same DTensor, or a plain tensor
    of all rows, as `full_tensor()` gives it. A text says why there are none."""
    wanted = f"wanted torch.uint8 [{layout.rows}, {ALIGNMENT}] cut in {layout.ranks} parts, or whole"
    if not isinstance(given, torch.Tensor):
        return f"is a {type(given).__name__}, {wanted}"
    if given.dtype != torch.uint8 or tuple(given.shape) != (layout.rows, ALIGNMENT):
        return f"is {given.dtype} {list(given.shape)}, {wanted}"
    first, own = layout.of_rank(rank)[0] // ALIGNMENT, layout.rows_of(rank)
    if not is_part(given):
        return given[min(first, layout.rows) :][:own]
    part: Any = given
    mesh, places = part.device_mesh, part.placements
    held, of = mesh.get_local_rank(-1), mesh.size(-1)
    cut = places[-1].is_shard(0) and all(place.is_replicate() for place in places[:-1])
    local = part.to_local()
    if not cut or (held, of) != (rank, layout.ranks) or tuple(local.shape) != (own, ALIGNMENT):
        return f"is {list(local.shape)} on rank {held} of {of}, placed by {places}, {wanted}"
    return local
