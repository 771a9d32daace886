"""What a step keeps and makes, at its peak, by a step on tensors without memory.

    activation_bytes(model, tokens=4096)

Forward, loss and backward run operator by operator with torch's FakeTensorMode: shapes and lifetimes are
those of an eager step, nothing is computed. Scratch inside kernels is not seen. Gradients of parameters are
let go as soon as they are there: they are counted elsewhere.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from monograph.training.loss import forward_loss
from monograph.upstream.torch_names import FakeTensorMode, TorchDispatchMode, tree_leaves


class _Live(TorchDispatchMode):  # type: ignore[misc]
    """Bytes of the storages that operators made and that are still there; their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
        self.peak = max(self.peak, self.alive)
        return result

    def _freed(self, key: int) -> None:
        self.alive -= self._sizes.pop(key, 0)


def activation_bytes(model: nn.Module, tokens: int) -> int:
    """The peak for one row of `tokens` tokens. The memory of the model may be untouched: nothing is read."""
    trained = [p for p in model.parameters() if p.requires_grad]

    def let_go(parameter: torch.Tensor) -> None:
        parameter.grad = None

    with FakeTensorMode(allow_non_fake_inputs=True):
        ids = torch.zeros(1, tokens, dtype=torch.long)
        batch = {"input_ids": ids, "labels": ids, "position_ids": torch.zeros_like(ids)}
        targets = torch.ones((), dtype=torch.long)
        hooks = [p.register_post_accumulate_grad_hook(let_go) for p in trained]
        try:
            with _Live() as live:
                forward_loss(model, batch, targets).backward()
        finally:
            for hook in hooks:
                hook.remove()
    return live.peak
