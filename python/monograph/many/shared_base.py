"""Another tree of modules over the tensors of a base: an adapter gets its own modules, and no byte is copied.

What an adapter changes in a model (wrapped layers, numbers of its dropouts, regions, hooks, config) is in the
modules. So a model that is alone in its tree is trained as one that is alone in its process.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from monograph.memory.base_memory import base_memory_of
from monograph.training.regions import region_layers


def with_same_base(model: nn.Module) -> Any:
    """A deep copy of a frozen model whose parameters and buffers are those of `model`, not copies of them."""
    refuse_what_is_no_base(model)
    kept = [*_tensors(model), *_configs(model)]
    memo = {id(one): one for one in kept}
    made = copy.deepcopy(model, memo)
    for (name, found), wanted in zip(_named(made), (tensor for _, tensor in _named(model)), strict=True):
        if found is not wanted:
            raise RuntimeError(f"with_same_base: {name} was copied, wanted the tensor of the base itself")
    return made


def refuse_what_is_no_base(model: nn.Module) -> None:
    """ValueError that names what cannot be shared."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"the base is a {type(model).__name__}, wanted a model")
    if hasattr(model, "peft_config"):
        raise ValueError("the base has an adapter of PEFT, wanted the model without one")
    if region_layers(model):
        raise ValueError(
            "the base has regions, wanted the model as it was loaded: undo_regions(model) before"
        )
    if base_memory_of(model) is not None:
        raise ValueError("base_memory is set on the base, wanted a base that may be in memory as a whole")


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _configs(model: nn.Module) -> Iterator[Any]:
    """By which layers of two trees count as the same: they share what was traced of them."""
    for module in model.modules():
        config = vars(module).get("config")
        if config is not None:
            yield config


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Those of the modules, and those that they keep beside: row norms, what a file was mapped to."""
    yield from (tensor for _, tensor in _named(model))
    for module in model.modules():
        yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))
