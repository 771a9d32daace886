"""The squared norms of the rows of a frozen weight, for DoRA: kept beside the layer, true for its bytes."""

from __future__ import annotations

from typing import Any

import torch


def keep_row_squares(layer: Any) -> None:
    """Gives a frozen layer the buffer `row_squares`, the squared norm of each row of its weight, and keeps it
    true when other weights are loaded. float32 entries as bytes, so that no cast of the model rounds them."""
    if not hasattr(layer, "row_squares"):
        layer.register_buffer("row_squares", None, persistent=False)
        layer.register_load_state_dict_post_hook(_refresh_row_squares)
    _refresh_row_squares(layer)


@torch.no_grad()
def _refresh_row_squares(layer: Any, _: Any = None) -> None:
    squares = layer.dequantize(torch.float32).square().sum(1).view(torch.uint8)
    if layer.row_squares is None or layer.row_squares.device != squares.device:
        layer.row_squares = squares
    else:
        layer.row_squares.copy_(squares)  # in place: a compiled graph holds this tensor
