"""What the layers of PEFT's adapters compute with beside their tensors: scaling, and which adapters are on or
merged. PEFT changes all of it in place."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn


def adapter_layers(modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, Any]]:
    """Those of PEFT's adapters, by path; none where PEFT was never imported."""
    if "peft" not in sys.modules:
        return []
    from monograph.upstream.peft_names import BaseTunerLayer

    return [(path, module) for path, module in modules if isinstance(module, BaseTunerLayer)]


def constants(layer: Any) -> tuple[Any, ...]:
    """What a forward of the layer reads: scaling, and which adapters are active, disabled or merged."""
    scaling = getattr(layer, "scaling", None)
    return (
        tuple(scaling.items()) if isinstance(scaling, dict) else scaling,
        tuple(layer.active_adapters),
        layer.disable_adapters,
        layer.merged,
    )


def untrained_adapters(layer: Any) -> list[tuple[str, str]]:
    """Adapters with trained parameters that a forward of the layer does not read, each with the reason."""
    off = layer.merged or layer.disable_adapters
    found = []
    for adapter, parts in _adapters(layer).items():
        idle = off or adapter not in layer.active_adapters
        if idle and any(parameter.requires_grad for parameter in parts):
            merged = "merged into its base, wanted model.unmerge_adapter() before the step"
            disabled = "disabled, wanted its layers enabled before the step"
            inactive = "not active, wanted model.set_adapter before the step"
            found.append((adapter, merged if layer.merged else disabled if off else inactive))
    return found


def _adapters(layer: Any) -> dict[str, list[nn.Parameter]]:
    """The parameters of each adapter."""
    found: dict[str, list[nn.Parameter]] = {}
    for name in layer.adapter_layer_names:
        parts = getattr(layer, name, None)
        for adapter, part in parts.items() if isinstance(parts, nn.ModuleDict | nn.ParameterDict) else ():
            own = [part] if isinstance(part, nn.Parameter) else list(part.parameters())
            found.setdefault(adapter, []).extend(own)
    return found
