"""What a step keeps and makes, at its peak, by a step on tensors without memory.

    activation_bytes(model, tokens=4096)

Forward, loss and backward run operator by operator with torch's FakeTensorMode: shapes and lifetimes are
those of a step of the mode `graph`, nothing is computed. Layers are regions where they can be one, and the
operators inside a region or a slice of tokens count. Of scratch inside kernels the packed input of a product
is counted. Gradients of parameters are let go as soon as they are there: they are counted elsewhere.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from monograph.memory.offload.activations import SMALLEST_BYTES
from monograph.ops import token_slices
from monograph.training.loss import forward_loss
from monograph.training.regions import make_regions, region_layers, undo_regions
from monograph.training.regions.registry import Called, traced_for
from monograph.upstream.torch_names import FakeTensorMode, TorchDispatchMode, tree_leaves

_REGION = torch.ops.monograph.region.default
_REGION_BACKWARD = torch.ops.monograph.region_backward.default
# Kernels that hold a copy of their first argument, packed for the matrix units.
_PACKING = (torch.ops.monograph.linear.default, torch.ops.monograph.linear_dx.default)
_SLICES = torch.ops.monograph.token_slices.default
_SLICES_BACKWARD = torch.ops.monograph.token_slices_backward.default


class _Live(TorchDispatchMode):  # type: ignore[misc]
    """Bytes of the storages that operators made and that are still there; their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._sizes: dict[int, int] = {}

        self._traces: dict[str, Any] = {}

    def _look_inside(self, func: Any, args: Any) -> None:
        """Runs what an operator of ours computes by graphs; its results are dropped."""
        if func in (_REGION, _REGION_BACKWARD):
            layer = args[0]
            if func is _REGION:
                _, call, trained, mode, autocast, hidden, seed, inputs, parameters = args
                called = Called(layer, call, trained, mode, autocast, [hidden, *inputs], seed)
                self._traces[layer] = traced_for(called)
                graph, kept = self._traces[layer][0].forward, []
            else:
                _, hidden, seed, inputs, parameters, _, kept, dy, dbeside, _ = args
                graph = self._traces[layer][0].backward
                kept = [*kept[: len(self._traces[layer][0].kept)], dy, *dbeside]
            traced, state = self._traces[layer]
            frozen = [state.tensors[name] for name in traced.frozen]
            given = [] if seed is None else [seed]
            with self:
                graph(hidden, *inputs, *given, *parameters, *frozen, *state.streams, *kept)
        elif func is _SLICES:
            with self:
                token_slices.forward_slices(*args)
        elif func is _SLICES_BACKWARD:
            with self:
                token_slices.backward_slices(*args)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._look_inside(func, args)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        given = {id(tensor.untyped_storage()) for tensor in tensors}
        result = func(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key = id(storage)
            if key in given or key in self._sizes:
                continue
            self._sizes[key] = size = storage.nbytes()
            self.alive += size
            weakref.finalize(storage, self._freed, key)
        packed = args[0].nbytes if func in _PACKING and args[0].is_floating_point() else 0
        self.peak = max(self.peak, self.alive + packed)
        return result

    def _freed(self, key: int) -> None:
        self.alive -= self._sizes.pop(key, 0)


def activation_bytes(model: nn.Module, tokens: int, *, offload: bool = False) -> int:
    """The peak for one row of `tokens` tokens. The memory of the model may be untouched: nothing is read.

    offload: what the forward keeps of 1 MiB and more waits elsewhere. The layers become regions.
    """
    make_regions(model, where_possible=True)
    try:
        return _peak(model, tokens, offload)
    except RuntimeError:
        if all(layer.region_refused is None for layer in region_layers(model).values()):
            raise
        undo_regions(model)
        return _peak(model, tokens, offload)


def _elsewhere(model: nn.Module) -> Any:
    """Hooks by which what autograd keeps has no memory until it is read."""
    stays = {id(tensor.untyped_storage()) for tensor in (*model.parameters(), *model.buffers())}

    def put(tensor: torch.Tensor) -> Any:
        if tensor.nbytes < SMALLEST_BYTES or id(tensor.untyped_storage()) in stays:
            return tensor
        return tuple(tensor.shape), tensor.dtype

    def take(kept: Any) -> torch.Tensor:
        return kept if isinstance(kept, torch.Tensor) else torch.empty(kept[0], dtype=kept[1])

    return torch.autograd.graph.saved_tensors_hooks(put, take)


def _peak(model: nn.Module, tokens: int, offload: bool) -> int:
    trained = [p for p in model.parameters() if p.requires_grad]

    def let_go(parameter: torch.Tensor) -> None:
        parameter.grad = None

    with FakeTensorMode(allow_non_fake_inputs=True):
        ids = torch.zeros(1, tokens, dtype=torch.long)
        batch = {"input_ids": ids, "labels": ids, "position_ids": torch.zeros_like(ids)}
        targets = torch.ones((), dtype=torch.long)
        hooks = [p.register_post_accumulate_grad_hook(let_go) for p in trained]
        try:
            with _Live() as live, _elsewhere(model) if offload else nullcontext():
                forward_loss(model, batch, targets).backward()
        finally:
            for hook in hooks:
                hook.remove()
    return live.peak
