"""A block with packed weights and LoRA beside PEFT's on the dequantised block."""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import monograph as mg
from monograph.nn import replace_linears

CASES = {
    "lora": {"r": 8, "lora_alpha": 12},
    "rslora": {"r": 8, "lora_alpha": 12, "use_rslora": True},
    "dora": {"r": 8, "use_dora": True},
    "lora_bias": {"r": 8, "lora_bias": True},
    "patterns": {"r": 8, "rank_pattern": {"down": 3}, "alpha_pattern": {"up": 5}},
}


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = nn.Linear(96, 160, dtype=dtype)
        self.down = nn.Linear(160, 96, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def pair(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """The same adapter on a dense model in PEFT's own code, and on the packed one in ours."""
    torch.manual_seed(0)
    packed = replace_linears(Block(dtype), "nf4", double_quant=True, skip=())
    dense = Block(dtype)
    for name in ("up", "down"):
        getattr(dense, name).weight = nn.Parameter(getattr(packed, name).dequantize())
        getattr(dense, name).bias = nn.Parameter(getattr(packed, name).bias.detach().clone())
    config = LoraConfig(target_modules=["up", "down"], init_lora_weights=False, **options)
    peft_model = get_peft_model(dense, config)
    ours = mg.add_lora(packed, copy.deepcopy(config))
    state = {k: v for k, v in peft_model.state_dict().items() if "lora_" in k}
    with torch.no_grad():
        for key in state:
            state[key] = state[key] * 0.3 if "magnitude" not in key else state[key] * 1.1
    for model in (peft_model, ours):
        model.load_state_dict(state, strict=False)
    return peft_model, ours
