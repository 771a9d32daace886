"""Activation checkpointing by the names of the installed transformers.

5.23 calls it activation checkpointing and warns of the names of 5.22, which are gone in version 6.
"""

from __future__ import annotations

from typing import Any


def enable_checkpointing(model: Any, options: dict[str, Any] | None = None) -> None:
    """`options` are torch.utils.checkpoint's; without them transformers' own."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)


def disable_checkpointing(model: Any) -> None:
    disable = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
    disable()


def is_checkpointing(model: Any) -> bool | None:
    """None for a model that is not transformers'."""
    for name in ("is_activation_checkpointing", "is_gradient_checkpointing"):
        if hasattr(model, name):
            return bool(getattr(model, name))
    return None
