"""Finding the repeated layers of a transformers model and making them regions."""

from __future__ import annotations

from torch import nn

from monograph.integrations.torch.private_names import hooks
from monograph.regions import operator  # noqa: F401  (registers the operators)
from monograph.regions.layer import RegionLayer, give_back, take_over


def repeated_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks that checkpointing works on, by path; of blocks inside blocks the outer ones."""
    from monograph.integrations.transformers.private_names import GradientCheckpointingLayer

    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if isinstance(module, GradientCheckpointingLayer) and not inside:
            found[path] = module
    return found


def make_regions(model: nn.Module) -> nn.Module:
    """Makes regions of the repeated layers of a model, in place; those that are regions stay."""
    layers = repeated_layers(model)
    if not layers:
        raise ValueError(
            f"regions: {type(model).__name__} has no layer that transformers can checkpoint, wanted a "
            "transformers model"
        )
    for path, layer in layers.items():
        if isinstance(layer, RegionLayer):
            continue
        if "forward" in vars(layer) or any(hooks(layer)):
            raise ValueError(f"regions: {path} has a forward or hooks of somebody else, wanted none")
        take_over(layer, path)
    return model


def undo_regions(model: nn.Module) -> nn.Module:
    for layer in region_layers(model).values():
        give_back(layer)
    return model


def region_layers(model: nn.Module) -> dict[str, RegionLayer]:
    return {path: m for path, m in model.named_modules() if isinstance(m, RegionLayer)}
