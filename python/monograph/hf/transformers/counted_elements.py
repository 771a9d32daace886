"""`model.num_parameters()` of a packed model: elements, as transformers counts those of bitsandbytes."""

from __future__ import annotations

import math
from types import MethodType
from typing import Any

from monograph.nn import PackedEmbedding, PackedExperts, QuantLinear
from monograph.upstream.torch_names import parameters_of


def _elements(layer: QuantLinear | PackedExperts | PackedEmbedding) -> int:
    if isinstance(layer, PackedEmbedding):
        return layer.num_embeddings * layer.embedding_dim
    if isinstance(layer, QuantLinear):
        return layer.in_features * layer.out_features
    return sum(math.prod(stack.shape) for stack in layer.stacks.values())


def num_parameters(model: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """transformers' own count with elements in the place of stored bytes, none of which is trained."""
    total: int = type(model).num_parameters(model, only_trainable, exclude_embeddings)
    if only_trainable:
        return total
    for layer in model.modules():
        if isinstance(layer, PackedEmbedding) and layer.is_head:
            continue  # counted there
        if isinstance(layer, (QuantLinear, PackedExperts, PackedEmbedding)):
            own = parameters_of(layer).values()
            stored = sum(p.numel() for p in own if p is not None and not p.is_floating_point())
            total += _elements(layer) - stored
    return total


def count_elements(model: Any) -> None:
    """From now on this model counts so."""
    model.num_parameters = MethodType(num_parameters, model)
