"""Keys and values that a decoder layer leaves for later layers: Gemma 3n and Gemma 4.

transformers hands all layers one dictionary. One layer of each type puts its keys and values there, those
behind it of the same type have none of their own and read them.
"""

from __future__ import annotations

from typing import Any

from torch import nn

KEYWORD = "shared_kv_states"
STORED = 2  # tensors that a layer stores: keys, values


def _type_if(layer: nn.Module, flag: str) -> str:
    attention: Any = getattr(layer, "self_attn", None)
    return str(attention.layer_type) if getattr(attention, flag, False) is True else ""


def read_type(layer: nn.Module) -> str:
    """Under which name the layer reads keys and values; "" if it has its own."""
    return _type_if(layer, "is_kv_shared_layer")


def stored_type(layer: nn.Module) -> str:
    """Under which name it stores its own for others; "" if it does not."""
    return _type_if(layer, "store_full_length_kv")
