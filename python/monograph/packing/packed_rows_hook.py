"""PackedRowsHook: a model that is given packed rows refuses them, in eager mode and inside a graph."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import nn

from monograph.upstream.torch_names import assert_async


def require(condition: torch.Tensor, message: str) -> None:
    """ValueError where a bool tensor [] is False; inside a graph, and on a device that is not waited for, a
    RuntimeError when it runs."""
    if torch.compiler.is_compiling():
        assert_async(condition, message)
        return
    if condition.device.type != "cpu":
        with suppress(NotImplementedError):  # a device without assertions
            assert_async(condition, message)
            return
    if not bool(condition):
        raise ValueError(message)


def falls(positions: torch.Tensor) -> torch.Tensor:
    """Where a token's position is lower than the one before: there a document starts.

    Of 3-D rotary positions the first ascends; height and width may fall. generate() gives padding on the left
    the position 0 or 1: a fall from there starts no document.
    """
    if positions.dim() == 3:
        positions = positions[0]
    return (positions[..., 1:] < positions[..., :-1]) & (positions[..., :-1] > 1)


class PackedRowsHook:
    """A forward pre-hook that refuses packed rows with the message of refusal(); None: they are allowed."""

    def refusal(self, module: nn.Module, what: str) -> str | None:
        raise NotImplementedError

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        for name in ("cu_seqlens", "cu_seq_lens_q", "seq_idx"):
            if kwargs.get(name) is not None and (message := self.refusal(module, name)) is not None:
                raise ValueError(message)
        positions = kwargs.get("position_ids")
        message = self.refusal(module, "restarting position_ids")
        if message is not None and positions is not None and positions.shape[-1] > 1:
            require(~falls(positions).any(), message)
