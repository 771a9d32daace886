"""Finding the repeated layers of a transformers model and making them regions."""

from __future__ import annotations

from torch import nn

from monograph.nn.repeated_layers import repeated_layers
from monograph.training.regions import operator  # noqa: F401  (registers the operators)
from monograph.training.regions.layer import RegionLayer, give_back, take_over
from monograph.upstream.torch_names import hooks


def refusals(model: nn.Module) -> dict[str, str]:
    """Why a model, under the path "", or layers of it cannot be regions."""
    layers = repeated_layers(model)
    if not layers:
        name = type(model).__name__
        return {"": f"{name} has no layer that transformers can checkpoint, wanted a transformers model"}
    return {
        path: f"{path} has a forward or hooks of somebody else, wanted none"
        for path, layer in layers.items()
        if not isinstance(layer, RegionLayer) and ("forward" in vars(layer) or any(hooks(layer)))
    }


def make_regions(model: nn.Module, *, where_possible: bool = False) -> nn.Module:
    """Makes regions of the repeated layers of a model, in place; those that are regions stay.

    where_possible: leaves the layers that `refusals` names as they are, instead of an error.
    """
    refused = refusals(model)
    if refused and not where_possible:
        raise ValueError(f"regions: {next(iter(refused.values()))}")
    for path, layer in repeated_layers(model).items():
        if path not in refused and not isinstance(layer, RegionLayer):
            take_over(layer, path)
    return model


def undo_regions(model: nn.Module) -> nn.Module:
    for layer in region_layers(model).values():
        give_back(layer)
    return model


def region_layers(model: nn.Module) -> dict[str, RegionLayer]:
    return {path: m for path, m in model.named_modules() if isinstance(m, RegionLayer)}
