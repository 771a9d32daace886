"""A GGUF file: ggml's blocks as they lie there, each tensor in a type of its own.

    {"quant_method": "gguf", "file": "/models/llama-Q4_K_M.gguf"}

stands in the config.json that `hf/transformers/gguf_folder.py` makes of such a file, and in no other.
`weight_q4_k` is uint8 [rows, bytes] and `weight_rows` int32 the stored row of each row, where the file has
another order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from monograph.ops.formats import GGML_FORMATS
from monograph.quant.ggml_weight import ggml_weight
from monograph.quant.packed_weight import PackedWeight
from monograph.quant.quant_methods.quant_method import Config, QuantMethod

ROWS = "weight_rows"


class Gguf(QuantMethod):
    name = "GGUF"
    methods = ("gguf",)
    parts = ("weight", *(f"weight_{name}" for name in GGML_FORMATS), ROWS)

    def stack_parts(self, name: str) -> list[str]:
        return [name]  # experts have no stacks of both projections there

    def formats(self, config: Mapping[str, Any]) -> list[str]:
        if not isinstance(config.get("file"), str):
            raise ValueError("quant_method is 'gguf' without a file; wanted the path of a .gguf as the model")
        return list(GGML_FORMATS)

    def pack(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> PackedWeight | None:
        blocks = {name: tensor for name, tensor in tensors.items() if name not in ("weight", ROWS)}
        if not blocks:
            return None
        ((name, values),) = blocks.items()
        fmt = GGML_FORMATS[name.removeprefix("weight_")]
        cols = values.shape[-1] // fmt.block_bytes * fmt.block_sizes[0]
        return ggml_weight(values, fmt.name, cols, dtype=dtype, row_map=tensors.get(ROWS))

    def unpack(self, weight: PackedWeight) -> dict[str, torch.Tensor]:
        raise ValueError(f"format {weight.format.name} belongs to a GGUF file, which is not written again")

    def saved_again(self, config: Mapping[str, Any], dense: Sequence[str]) -> Config:
        return dict(config)
