"""Routers of a transformers model on linear and choose_experts.

torch's product and softmax round by processor and version, and its topk says nothing of equal logits. A
frozen router that is the softmax of one product, the largest of it taken, computes with our operators: no bit
depends on the batch, and a program without torch computes the same. A router that is trained stays.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from monograph.hf.transformers.module_probe import (
    KERNEL_TYPES,
    ROWS,
    draw,
    lies_where,
    probe_of,
    runs_here,
    tried,
)
from monograph.ops.choose_experts import choose_experts
from monograph.ops.linear import plain_linear
from monograph.upstream.instance_class import put_before
from monograph.upstream.torch_names import buffers_of, parameters_of

_OPERATORS = ("linear", "choose_experts")


class FusedRouter(nn.Module):
    weight: torch.Tensor
    top_k: int
    monograph_normalise: bool

    def forward(self, hidden_states: torch.Tensor) -> Any:
        weight = self.weight
        here = all(runs_here(name, hidden_states, weight) for name in _OPERATORS)
        if weight.requires_grad or not here or torch.is_autocast_enabled(hidden_states.device.type):
            return super().forward(hidden_states)
        logits = plain_linear(hidden_states.reshape(-1, weight.shape[1]), weight)
        return logits, *choose_experts(logits, self.top_k, normalise=self.monograph_normalise)


def take_router(module: Any) -> bool:
    weight: Any = parameters_of(module).get("weight")
    known = (
        type(module).__name__.endswith("Router")
        and "forward" not in module.__dict__
        and list(parameters_of(module)) == ["weight"]
        and not buffers_of(module)
        and not list(module.children())
        and isinstance(getattr(module, "top_k", None), int)
        and isinstance(weight, torch.Tensor)
        and weight.dim() == 2
        and 1 <= module.top_k <= weight.shape[0]
        and weight.dtype in KERNEL_TYPES
        and not weight.is_meta
        and all(lies_where(name, module) for name in _OPERATORS)
        and list(inspect.signature(type(module).forward).parameters) == ["self", "hidden_states"]
    )
    if not known:
        return False
    for normalise in (True, False):
        if all(_agrees(module, normalise, dtype) for dtype in (torch.float32, torch.bfloat16)):
            module.monograph_normalise = normalise
            put_before(FusedRouter, module)
            return True
    return False


def _agrees(module: Any, normalise: bool, dtype: torch.dtype) -> bool:
    """Its own forward gives the logits of one product, and of these what the operator gives."""
    experts, width = module.weight.shape
    x, weight = draw(0, ROWS, width).to(dtype), (2 * draw(1, experts, width) / width**0.5).to(dtype)
    want = tried(type(module).forward, probe_of(module, {"weight": weight}, {}), x)
    if not isinstance(want, tuple) or len(want) != 3 or not all(isinstance(t, torch.Tensor) for t in want):
        return False
    logits, weights, ids = want
    if (logits.shape, logits.dtype, weights.dtype, ids.dtype) != ((ROWS, experts), dtype, dtype, torch.int64):
        return False
    exact = x.double() @ weight.double().T
    slack = 2 * torch.finfo(dtype).eps * (exact.abs() + 2**-14 * (x.double().abs() @ weight.double().abs().T))
    if not bool(((logits.double() - exact).abs() <= slack + 2**-18).all()):
        return False
    got, own_ids = choose_experts(logits, module.top_k, normalise=normalise)
    if got.shape != weights.shape or (dtype == torch.float32 and not torch.equal(own_ids, ids)):
        return False
    # Of equal logits in a 16-bit type torch may take any.
    return bool(((got - weights).abs() <= 4 * torch.finfo(dtype).eps * got.abs()).all())
