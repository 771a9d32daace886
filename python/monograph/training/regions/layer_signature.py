"""What two layers must share to share a trace: their code, their constants and the shapes of their tensors.

Everything is read anew at each call, so that whatever changed a layer since (an adapter switched or disabled,
weights merged, a cast, a hook) finds the trace of what the layer is now, or is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, fields, is_dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn

from monograph.distributed.shard_placeholder import ShardPlaceholder
from monograph.distributed.sharded_layer import ShardSpec
from monograph.ops.seeded_dropout import SeededDropout
from monograph.upstream.torch_names import (
    buffers_of,
    has_any_global_hook,
    hooks,
    parameters_of,
)
from monograph.upstream.transformers_names import attn_implementation_of

# What nn.Module itself keeps in an instance; tensors and children of it are read by name.
_OWN = frozenset(vars(nn.Module())) - {"training"}
# Differs from layer to layer and is not read by a forward: where a weight came from, how an adapter began,
# what PEFT made a layer with (`kwargs`). A stream is an input of the trace. `layer_idx` is watched while
# tracing, so that it may be left out.
_LEFT_OUT = frozenset(
    {"dense_source", "starts", "_caches", "stream", "layer_idx", "_is_hf_initialized", "kwargs"}
)
_SIMPLE = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size, type, ShardSpec)


class Same:
    """An object that counts as equal to itself only. Holds it, so that its id is not given away."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value


@dataclass(frozen=True)
class State:
    """tensors: all of a layer by name: parameters, buffers, plain attributes. key: all a trace depends on.
    streams: of its dropouts. hooked: the first module with a hook, or all of them; a trace would
    run it once, ever."""

    tensors: dict[str, torch.Tensor]
    key: Hashable
    streams: list[int]
    hooked: str | None


def _constant(value: Any) -> Hashable:
    if isinstance(value, _SIMPLE):
        return value
    if isinstance(value, (list, tuple)):
        return (type(value), *map(type, value), *(_constant(part) for part in value))
    if isinstance(value, dict):
        return (dict, *((name, type(part), _constant(part)) for name, part in value.items()))
    if isinstance(value, (set, frozenset)):
        return frozenset(_constant(part) for part in value)
    if isinstance(value, FunctionType) and value.__closure__ is None:
        defaults = _constant(value.__defaults__), _constant(value.__kwdefaults__)
        return (FunctionType, Same(value.__code__), *defaults, Same(value.__globals__))
    if isinstance(value, functools.partial):
        return (functools.partial, *(_constant(part) for part in (value.func, value.args, value.keywords)))
    if is_dataclass(value) and not isinstance(value, type):  # what packed experts know of their stacks
        return (type(value), *(_constant(getattr(value, part.name)) for part in fields(value)))
    if isinstance(value, torch.Tensor) and value.is_meta:
        return shape_of(value)
    # An object without state, as PEFT's variants of LoRA, is its class.
    if hasattr(value, "__dict__") and not vars(value) and not callable(value):
        return Same(type(value))
    return Same(value)


def _of_config(config: Any) -> Hashable:
    """A config is shared by all layers and changed in place; forward passes read their attention there."""
    return Same(config), attn_implementation_of(config)


def shape_of(tensor: torch.Tensor) -> Hashable:
    return tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride()


def state_of(layer: nn.Module) -> State:
    tensors: dict[str, torch.Tensor] = {}
    constants: list[Hashable] = []
    streams: list[int] = []
    hooked = "every module of torch.nn" if has_any_global_hook() else None
    for path, module in layer.named_modules():
        prefix = f"{path}." if path else ""
        if hooked is None and any(hooks(module)):
            hooked = path or "the layer"
        if isinstance(module, SeededDropout):
            streams.append(module.stream)
        for group in (parameters_of(module), buffers_of(module)):
            # What stands for tensors that are elsewhere is read by nobody.
            named = ((prefix + name, t) for name, t in group.items() if t is not None)
            tensors.update((name, t) for name, t in named if not isinstance(t, ShardPlaceholder))
        constants.append((path, type(module)))
        for name, value in vars(module).items():
            if name in _OWN or name in _LEFT_OUT or name.startswith("region_"):
                continue
            if isinstance(value, torch.Tensor):
                tensors[prefix + name] = value
            elif name == "config":
                constants.append(_of_config(value))
            else:
                constants.append((name, type(value), _constant(value)))
    shapes = tuple((name, shape_of(t), t.requires_grad) for name, t in tensors.items())
    return State(tensors, (tuple(constants), shapes), streams, hooked)
