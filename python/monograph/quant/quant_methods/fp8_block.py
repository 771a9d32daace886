"""FP8 with blocks as DeepSeek and transformers write it: `weight` in E4M3 and `weight_scale_inv`.

    {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", ...}

`weight_scale_inv` multiplies, in spite of its name. It is fp32 (DeepSeek-V3), bf16 (Qwen3) or E8M0
("scale_fmt": "ue8m0"). transformers' "mxfp8" is the same with blocks of [1, 32] and bytes for scales. How
activations are rounded while serving ("activation_scheme") is not done here: only the weights are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from monograph.quant.packed_weight import PackedWeight
from monograph.quant.quant_methods.element_tensors import DENSE, e4m3_weight, stored_scales, stored_values
from monograph.quant.quant_methods.quant_method import Config, Quantization, QuantMethod, listed

_BLOCKS = {(128, 128): "fp8-block", (1, 32): "mxfp8"}


class Fp8Block(QuantMethod):
    name = "transformers fp8"
    methods = ("fp8", "mxfp8")
    saves = ("fp8-block",)
    parts = ("weight", "weight_scale_inv", "activation_scale", "input_scale")

    def formats(self, config: Mapping[str, Any]) -> list[str]:
        block = config.get("weight_block_size")
        format = _BLOCKS.get(tuple(block)) if isinstance(block, (list, tuple)) else None
        if format is None:
            found = "one scale per tensor or row" if block is None else list(block)
            raise ValueError(f"weight_block_size is {found}, wanted [128, 128] or [1, 32]")
        if config.get("fmt", "e4m3") != "e4m3":
            raise ValueError(f"fmt is {config['fmt']!r}, wanted 'e4m3'")
        if config.get("modules_to_convert"):
            raise ValueError(
                f"modules_to_convert is {config['modules_to_convert']}, wanted linear layers alone"
            )
        return [format]

    def pack(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> PackedWeight | None:
        weight, scale = tensors.get("weight"), tensors.get("weight_scale_inv")
        if weight is None or (scale is None and weight.dtype not in DENSE):
            raise ValueError(f"found {sorted(tensors)}, wanted weight and weight_scale_inv")
        if scale is None:
            return None
        if weight.dtype != torch.float8_e4m3fn:
            raise ValueError(f"weight is {weight.dtype} beside weight_scale_inv, wanted torch.float8_e4m3fn")
        return e4m3_weight(weight, scale, dtype)

    def unpack(self, weight: PackedWeight) -> dict[str, torch.Tensor]:
        exponents = torch.uint8 if weight.format.name == "mxfp8" else torch.float8_e8m0fnu
        return {"weight": stored_values(weight), "weight_scale_inv": stored_scales(weight, exponents)}

    def config(self, chosen: Quantization) -> Config:
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "dequantize": False,
            "modules_to_not_convert": None if chosen.dense is None else list(chosen.dense),
            "modules_to_convert": None,
            "scale_fmt": "ue8m0" if chosen.scale_type == "e8m0" else "float",
            "expert_dtype": "fp8",
        }

    def saved_again(self, config: Mapping[str, Any], dense: Sequence[str]) -> Config:
        again = dict(config) | {"activation_scheme": "dynamic"}
        # MiniMax has its list under `ignored_layers`.
        key = "ignored_layers" if "ignored_layers" in config else "modules_to_not_convert"
        if dense:
            again[key] = listed(config.get(key), dense)
        return again
