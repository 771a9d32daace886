"""gpt-oss as OpenAI ships it: experts in MXFP4, everything else in 16 bits.

    {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", ...]}

`P_blocks` [E, outputs, inputs / 32, 16] holds two elements a byte, low nibble first, and `P_scales`
[E, outputs, inputs / 32] the exponents; P is `experts.gate_up_proj` or `experts.down_proj`. The parameter of
transformers' module is the transpose, [E, inputs, outputs]; the packed bytes already are what the operators
want.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from monograph.quant.packed_weight import PackedWeight
from monograph.quant.quant_methods.element_tensors import element_weight
from monograph.quant.quant_methods.quant_method import Config, QuantMethod, listed


class GptOss(QuantMethod):
    name = "gpt-oss"
    methods = ("mxfp4",)
    parts = ("weight_blocks", "weight_scales")
    linears = False

    def formats(self, config: Mapping[str, Any]) -> list[str]:
        return ["mxfp4"]

    def pack(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> PackedWeight | None:
        blocks, scales = tensors.get("weight_blocks"), tensors.get("weight_scales")
        if blocks is None or scales is None or blocks.dim() != 4 or blocks.shape[-1] != 16:
            found = {name: list(t.shape) for name, t in tensors.items()}
            raise ValueError(f"found {found}, wanted _blocks [E, outputs, inputs / 32, 16] and _scales")
        return element_weight("mxfp4", blocks.flatten(-2), scales, dtype)

    def unpack(self, weight: PackedWeight) -> dict[str, torch.Tensor]:
        *lead, cols = weight.shape
        blocks = [*lead, cols // 32]
        return {
            "weight_blocks": weight.values.reshape([*blocks, 16]),
            "weight_scales": weight.scales[0].reshape(blocks),
        }

    def saved_again(self, config: Mapping[str, Any], dense: Sequence[str]) -> Config:
        return dict(config) | {"modules_to_not_convert": listed(config.get("modules_to_not_convert"), dense)}
