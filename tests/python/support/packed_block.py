"""A block of packed layers, its dense copy, and the adapters of a PEFT model."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from monograph.nn import replace_linears


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = nn.Linear(96, 160, dtype=dtype)
        self.down = nn.Linear(160, 96, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def packed_block(dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return replace_linears(Block(dtype), "nf4", double_quant=True, skip=())


def dense_copy(packed: Any, dtype: torch.dtype | None = None) -> Block:
    dense = Block(dtype or packed.up.weight_dtype)
    for name in ("up", "down"):
        layer, source = getattr(dense, name), getattr(packed, name)
        layer.weight.data = source.dequantize(layer.weight.dtype)
        layer.bias.data = source.bias.detach().to(layer.weight.dtype)
    return dense


def adapters(**options: Any) -> Any:
    """The same random adapter by PEFT on the dense model, and on the packed one without `optimize`."""
    config = {"target_modules": ["up", "down"], "init_lora_weights": False, "r": 8, **options}
    packed = packed_block()
    peft_model = get_peft_model(dense_copy(packed), LoraConfig(**config))
    ours = get_peft_model(packed, LoraConfig(**config))
    ours.load_state_dict({k: v for k, v in peft_model.state_dict().items() if "lora_" in k}, strict=False)
    return peft_model.eval(), ours.eval()
