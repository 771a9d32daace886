"""`device` and `device_map`: the one device that a recipe trains on."""

from __future__ import annotations

import torch

from monograph.recipe.config.keys import Recipe
from monograph.recipe.config.sharding_keys import wants_fsdp

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


def _parsed(name: str) -> torch.device:
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
    device = _parsed(written_device(recipe))
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
        return _parsed(written_device(recipe)).type
    except ValueError:
        return "cpu"


def check_device(recipe: Recipe) -> list[str]:
    """Errors that need no such device: a recipe may be read and its data prepared on another machine."""
    try:
        kind = _parsed(written_device(recipe)).type
    except ValueError as error:
        return [str(error)]
    if kind == "cpu":
        return []
    if (recipe.shard_size or 1) > 1 or wants_fsdp(recipe):
        return [f"device is {kind}, and a base is sharded among ranks on the CPU only; leave one out"]
    return []


def check_ranks_of_device(device: torch.device, ranks: int) -> None:
    """Ranks sum gradients on the host."""
    if device.type != "cpu" and ranks > 1:
        raise ValueError(
            f"device is {device}, and {ranks} processes train together on the CPU only; start one"
        )
