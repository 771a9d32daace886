"""A GGUF file: ggml's blocks as they lie there, each tensor in a type of its own.

    {"quant_method": "gguf", "file": "/models/llama-Q4_K_M.gguf"}

stands in the config.json that `hf/transformers/gguf_folder.py` makes of such a file, and in no other.
`weight_q4_k` is uint8 [rows, bytes] and `weight_rows` int32 the stored row of each row, where the file has
another order. Experts are uint8 [E, rows, bytes]: `down_proj_q4_k`, and gate and up as two stacks,
`gate_up_proj_gate_q4_k` and `gate_up_proj_up_q6_k`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from monograph.ops.formats import GGML_FORMATS
from monograph.quant.ggml_weight import ggml_weight
from monograph.quant.packed_weight import PackedWeight
from monograph.quant.quant_methods.quant_method import Config, QuantMethod
from monograph.quant.stack_pair import Stack, StackPair

ROWS = "weight_rows"
PAIR = "gate_up_proj"  # the weight of experts that is two stacks in a file


class Gguf(QuantMethod):
    name = "GGUF"
    methods = ("gguf",)
    parts = ("weight", *(f"weight_{name}" for name in GGML_FORMATS), ROWS)

    def stack_parts(self, name: str) -> list[str]:
        fronts = ("gate_", "up_") if name == PAIR else ("",)
        return [name, *(f"{name}_{front}{kind}" for front in fronts for kind in GGML_FORMATS)]

    def formats(self, config: Mapping[str, Any]) -> list[str]:
        if not isinstance(config.get("file"), str):
            raise ValueError("quant_method is 'gguf' without a file; wanted the path of a .gguf as the model")
        return list(GGML_FORMATS)

    def pack(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Stack | None:
        blocks = {name: tensor for name, tensor in tensors.items() if name not in ("weight", ROWS)}
        if not blocks:
            return None
        kinds = {name.removeprefix("weight_"): values for name, values in blocks.items()}
        if all(kind.startswith(("gate_", "up_")) for kind in kinds):
            halves = {kind.partition("_")[0]: (kind.partition("_")[2], kinds[kind]) for kind in kinds}
            if len(kinds) != 2 or len(halves) != 2:
                raise ValueError(f"experts have {', '.join(kinds)}, wanted one stack of gate and one of up")
            gate, up = (_stack(*halves[half], dtype) for half in ("gate", "up"))
            return StackPair(gate, up)
        ((kind, values),) = kinds.items()
        if values.dim() == 3:
            return _stack(kind, values, dtype)
        cols = _columns(kind, values)
        return ggml_weight(values, kind, cols, dtype=dtype, row_map=tensors.get(ROWS))

    def unpack(self, weight: PackedWeight) -> dict[str, torch.Tensor]:
        raise ValueError(f"format {weight.format.name} belongs to a GGUF file, which is not written again")

    def saved_again(self, config: Mapping[str, Any], dense: Sequence[str]) -> Config:
        return dict(config)


def _columns(kind: str, values: torch.Tensor) -> int:
    fmt = GGML_FORMATS[kind]
    return values.shape[-1] // fmt.block_bytes * fmt.block_sizes[0]


def _stack(kind: str, values: torch.Tensor, dtype: torch.dtype) -> PackedWeight:
    """[E, rows, bytes] as they lie."""
    fmt, (experts, rows, _) = GGML_FORMATS[kind], values.shape
    shape = (experts, rows, _columns(kind, values))
    return PackedWeight(fmt, shape, fmt.block_sizes[0], values, (), dtype, grid_rows=rows)
