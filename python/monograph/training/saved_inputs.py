"""The inputs of checkpointed layers, which a step keeps for its backward, in 8 bits (quantize_activation).

The forward is exact. Backward computes each layer again from its rounded input, so that gradients, and they
alone, are those of another point nearby.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from monograph.nn.repeated_layers import repeated_layers
from monograph.ops.quantize_activation import dequantize_activation, quantize_activation
from monograph.training.regions import refusals, region_layers
from monograph.upstream.transformers_names import checkpoint_function, put_checkpoint_function

MODES = ("graph", "whole_step", "eager")


def quantize_saved_inputs(model: nn.Module, mode: str, *, offload: str | None = None) -> None:
    """For the steps of a mode, whose regions are made; what cannot do it is refused."""
    if mode not in MODES:
        raise ValueError(
            f"activation_quantization with mode {mode!r}, wanted one of {', '.join(MODES)}: it generates code"
        )
    if offload is not None and mode == "eager":
        raise ValueError(
            f"activation_quantization with mode 'eager' and offload {offload!r}, wanted mode 'graph': one of "
            "two hooks on a saved tensor sees it"
        )
    layers = repeated_layers(model)
    plain = [path for path, layer in layers.items() if not getattr(layer, "gradient_checkpointing", False)]
    if plain or not layers:
        found = plain[0] if plain else type(model).__name__
        raise ValueError(
            f"activation_quantization: {found} is not checkpointed, wanted gradient checkpointing: no input "
            "of a layer alone is kept without it"
        )
    if mode == "eager":
        for layer in layers.values():
            function = checkpoint_function(layer)
            if getattr(function, "func", None) is not _checkpointed:
                put_checkpoint_function(layer, partial(_checkpointed, function))
        return
    if refused := refusals(model):
        raise ValueError(f"activation_quantization: {next(iter(refused.values()))}")
    for region in region_layers(model).values():
        region.region_saves_8_bits = True


def keep_saved_inputs(model: nn.Module) -> None:
    """Undoes it: a step before this one may have wanted it."""
    for region in region_layers(model).values():
        region.region_saves_8_bits = False
    for layer in repeated_layers(model).values():
        function = checkpoint_function(layer)
        if getattr(function, "func", None) is _checkpointed:
            put_checkpoint_function(layer, function.args[0])


def _checkpointed(checkpoint: Callable[..., Any], function: Any, hidden: torch.Tensor, *args: Any) -> Any:
    """`checkpoint(function, hidden, *args)`, which keeps `hidden` in 8 bits."""

    def put(tensor: torch.Tensor) -> Any:
        if tensor.data_ptr() != hidden.data_ptr() or tensor.shape != hidden.shape:
            return tensor
        return (*quantize_activation(tensor.detach()), tensor.dtype)

    def take(kept: Any) -> torch.Tensor:
        return dequantize_activation(*kept) if isinstance(kept, tuple) else kept

    with torch.autograd.graph.saved_tensors_hooks(put, take):
        return checkpoint(function, hidden, *args)
