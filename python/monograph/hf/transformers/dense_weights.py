"""Which weights of a model are not packed, and why: what loading refuses or says.

Counted are the matrices that multiply activations: every floating parameter with at least two dimensions
longer than 1, of any module but embeddings and convolutions, and the packed layers. The output head is left
out: it is dense by default, and in a small model it is a quarter of the linear weights (Qwen3-0.6B), so that
counting it would blame every ordinary model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from monograph.nn.lazy_weight import LazyWeight
from monograph.nn.packed_experts import PackedExperts
from monograph.nn.quant_linear import QuantLinear

ENOUGH = 0.9  # of the linear weights; below it, what stayed dense is said
_SHOWN = 4
_NO_MATRICES = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class DenseWeight(NamedTuple):
    path: str  # of the module
    name: str  # of the parameter
    module: nn.Module
    parameter: nn.Parameter

    @property
    def full_name(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name


def dense_weights(model: nn.Module) -> Iterator[DenseWeight]:
    find_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = find_head()
    for path, module in model.named_modules():
        if isinstance(module, _NO_MATRICES) or module is head:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, LazyWeight):
                continue
            if parameter.is_floating_point() and sum(size > 1 for size in parameter.shape) >= 2:
                yield DenseWeight(path, name, module, parameter)


def expert_weights(model: nn.Module) -> list[DenseWeight]:
    """The weights of experts: stacks of matrices in one parameter, or those of a module named after them."""

    def of_experts(weight: DenseWeight) -> bool:
        if isinstance(weight.module, nn.Linear):
            return False
        *stack, rows, cols = weight.parameter.shape
        stacked = torch.Size(stack).numel() > 1 and rows > 1 and cols > 1
        named = "expert" in type(weight.module).__name__.lower() and "bias" not in weight.name
        return stacked or named

    return [weight for weight in dense_weights(model) if of_experts(weight)]


def shown(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def packed_share(model: nn.Module) -> float:
    """The share of the linear weights, by elements, that is packed."""
    layers = [layer for layer in model.modules() if isinstance(layer, QuantLinear)]
    packed = sum(layer.in_features * layer.out_features for layer in layers)
    stacks = [layer.stacks.values() for layer in model.modules() if isinstance(layer, PackedExperts)]
    packed += sum(torch.Size(weight.shape).numel() for own in stacks for weight in own)
    dense = sum(weight.parameter.numel() for weight in dense_weights(model))
    return packed / max(packed + dense, 1)


def what_stayed_dense(model: nn.Module, why_dense: Any) -> str | None:
    """A sentence if less than `ENOUGH` is packed. `why_dense(path)` gives the reason for a linear layer."""
    share = packed_share(model)
    if share >= ENOUGH:
        return None
    reasons: dict[str, list[DenseWeight]] = {}
    for weight in dense_weights(model):
        linear = isinstance(weight.module, nn.Linear)
        kind = type(weight.module).__name__
        reason = why_dense(weight.path) if linear else f"{kind} is not an nn.Linear"
        reasons.setdefault(reason, []).append(weight)
    parts = []
    for reason, weights in reasons.items():
        millions = sum(weight.parameter.numel() for weight in weights) / 1e6
        parts.append(f"{millions:.1f} M ({reason}): {shown([weight.full_name for weight in weights])}")
    return (
        f"{type(model).__name__}: {share:.0%} of the linear weights are packed, the output head not counted. "
        f"Dense stay {'; '.join(parts)}"
    )
