"""The decoder layers that a transformers model repeats."""

from __future__ import annotations

from torch import nn


def repeated_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks that checkpointing works on, by path; of blocks inside blocks the outer ones."""
    from monograph.upstream.transformers_names import GradientCheckpointingLayer

    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if isinstance(module, GradientCheckpointingLayer) and not inside:
            found[path] = module
    return found


def has_regions(model: nn.Module) -> bool:
    """Whether layers are regions: classes of regions know the class that they took the place of."""
    return any(hasattr(type(module), "region_original") for module in model.modules())
