"""Where a run computes and what its ranks share, as its keys say: the device, the copies of the base, and the
file for what a forward keeps."""

from __future__ import annotations

from typing import NamedTuple

import torch

from monograph.recipe.config.keys import Recipe

_ONE = "a recipe trains on one device; write device: cuda:0, or leave both out for the CPU"
# Words of accelerate that spread a model over devices.
_SPREAD = ("balanced", "balanced_low_0", "sequential")


def written_device(recipe: Recipe) -> str:
    """What the keys say: `cpu`, `auto`, or a device by name or number. ValueError if they contradict."""
    said: dict[str, str] = {}
    if recipe.device is not None:
        said["device"] = str(recipe.device)
    if isinstance(recipe.device_map, dict):
        places = sorted({str(place) for place in recipe.device_map.values()})
        if len(places) != 1:
            raise ValueError(f"device_map: {len(places)} devices ({', '.join(places)}); {_ONE}")
        said["device_map"] = places[0]
    elif recipe.device_map is not None:
        said["device_map"] = str(recipe.device_map)
    for key, place in said.items():
        if place in _SPREAD:
            raise ValueError(f"{key} is {place}, which spreads a model; {_ONE}")
        if place in ("disk", "meta"):
            raise ValueError(f"{key} is {place}, where nothing is computed; {_ONE}")
    if len(set(said.values())) > 1:
        raise ValueError(f"device is {said['device']} and device_map {said['device_map']}; leave one out")
    return next(iter(said.values()), "cpu")


def parsed_device(name: str) -> torch.device:
    """A number counts the devices of this machine's accelerator; `auto` is that accelerator, or the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return torch.device("cpu") if found is None else found
    if name.isdecimal():
        return torch.device("cuda" if found is None else found.type, int(name))
    try:
        parsed = torch.device(name)
    except RuntimeError:
        raise ValueError(
            f"device is {name!r}, wanted cpu, auto, cuda, cuda:0 or another device of torch"
        ) from None
    return torch.device("cpu") if parsed.type == "cpu" else parsed


def _found_here() -> str:
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None:
        last = torch.accelerator.device_count() - 1
        return f"cpu and {found.type}:0" + (f" to {found.type}:{last}" if last > 0 else "")
    built = torch.accelerator.current_accelerator()
    why = (
        "is built for the CPU alone"
        if built is None
        else f"is built for {built.type} and finds no such device"
    )
    return f"cpu alone (torch {torch.__version__} {why})"


def device_of(recipe: Recipe) -> torch.device:
    """The device of this machine that the keys mean. ValueError names it and what was found, if it is not
    there."""
    device = parsed_device(written_device(recipe))
    if device.type == "cpu":
        return device
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != device.type or (device.index or 0) >= torch.accelerator.device_count():
        raise ValueError(
            f"device: {device} is not on this machine, found {_found_here()}; leave it out for the CPU"
        )
    return torch.device(device.type, device.index or 0)


def device_type(recipe: Recipe) -> str:
    """The kind of device that the keys mean, there or not; "cpu" if they are wrong."""
    try:
        return parsed_device(written_device(recipe)).type
    except ValueError:
        return "cpu"


def check_ranks_of_device(device: torch.device, ranks: int) -> None:
    """Ranks sum gradients on the host."""
    if device.type != "cpu" and ranks > 1:
        raise ValueError(
            f"device is {device}, and {ranks} processes train together on the CPU only; start one"
        )


class Sharding(NamedTuple):
    """shard ranks share one copy of the base; there are replicate copies."""

    shard: int
    replicate: int


def wants_fsdp(recipe: Recipe) -> bool:
    """Whether axolotl would shard: fsdp_version alone says only how."""
    return bool(recipe.fsdp or recipe.fsdp_config)


def sharding_of(recipe: Recipe, ranks: int) -> Sharding:
    """How `ranks` processes hold the base. ValueError if the keys want another number of them."""
    shard, replicate = recipe.shard_size, recipe.replicate_size
    if shard is None and replicate is None:
        return Sharding(ranks, 1) if wants_fsdp(recipe) else Sharding(1, ranks)
    if shard is None or replicate is None:
        given, other = ("replicate_size", replicate) if shard is None else ("shard_size", shard)
        assert other is not None
        if ranks % other:
            raise ValueError(
                f"{given} is {other}, and WORLD_SIZE is {ranks}, wanted a multiple of {other}: "
                "shard_size * replicate_size = WORLD_SIZE"
            )
        return Sharding(ranks // other, other) if shard is None else Sharding(other, ranks // other)
    if shard * replicate != ranks:
        raise ValueError(
            f"shard_size is {shard} and replicate_size {replicate}: {shard * replicate} processes, and "
            f"WORLD_SIZE is {ranks}; wanted shard_size * replicate_size = WORLD_SIZE"
        )
    return Sharding(shard, replicate)


def expert_ranks(recipe: Recipe, ranks: int) -> int:
    """Over how many of `ranks` processes experts are spread. ValueError if they do not divide them."""
    size = recipe.expert_parallel_size or 1
    if ranks % size:
        raise ValueError(
            f"expert_parallel_size is {size}, and WORLD_SIZE is {ranks}, wanted a multiple of {size}"
        )
    return size


def offload_place(recipe: Recipe) -> str | None:
    """ "disk", "host" for `offload` on another device than the CPU, or None."""
    if recipe.gradient_checkpointing == "offload" and device_type(recipe) != "cpu":
        return "host"
    return "disk" if recipe.offloads else None


def offload_folder(recipe: Recipe) -> str | None:
    return recipe.offload_folder or recipe.output_dir if offload_place(recipe) == "disk" else None
