"""bitsandbytes' 4-bit weights as PackedWeight and back, byte for byte, without importing bitsandbytes.

In a state dict:

    state = safetensors.torch.load_file("model.safetensors")
    w = from_bitsandbytes(state, "model.layers.0.mlp.up_proj.weight")
    state.update(to_bitsandbytes(w, "model.layers.0.mlp.up_proj.weight"))
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from monograph.ops.dequantize import as_float32
from monograph.ops.formats import ABSMAX_FORMATS, SCALE_GROUP, Format, value_table
from monograph.quant.packed_weight import PackedWeight, canonical
from monograph.quant.quant_methods.packed_state import packed_state
from monograph.quant.quant_methods.quant_method import Config, Quantization, QuantMethod, listed
from monograph.quant.quant_methods.quant_state import dequantize_4bit, refuse_rearranged

__all__ = ["BitsAndBytes", "dequantize_4bit", "from_bitsandbytes", "from_quant_state", "to_bitsandbytes"]

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_STATE = "quant_state.bitsandbytes__"


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, flat; a view wherever the tensor is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _want(condition: bool, name: str, message: str) -> None:
    if not condition:
        raise ValueError(f"{name}: {message}")


def _find_state(state: Mapping[str, torch.Tensor], name: str) -> tuple[Format, dict[str, Any]]:
    found = [f for f in ABSMAX_FORMATS.values() if f"{name}.{_STATE}{f.name}" in state]
    _want(len(found) == 1, name, f"found {len(found)} entries '{name}.{_STATE}nf4|fp4', wanted 1")
    text = bytes(state[f"{name}.{_STATE}{found[0].name}"].cpu().tolist())
    fields: dict[str, Any] = json.loads(text)
    known = {"quant_type", "blocksize", "dtype", "shape", "nested_blocksize", "nested_dtype", "nested_offset"}
    _want(set(fields) <= known, name, f"quant_state has unknown fields {sorted(set(fields) - known)}")
    _want(
        fields["quant_type"] == found[0].name,
        name,
        f"quant_state says {fields['quant_type']!r}, its key says {found[0].name!r}",
    )
    return found[0], fields


def _check_map(fmt: Format, quant_map: torch.Tensor, name: str) -> None:
    same = torch.equal(as_float32(_as_bytes(quant_map)), value_table(fmt, quant_map.device))
    _want(same, name, f"quant_map is not the table of {fmt.name}")


def _nested_scales(
    state: Mapping[str, torch.Tensor], name: str, fields: dict[str, Any]
) -> list[torch.Tensor]:
    _want(
        fields["nested_blocksize"] == SCALE_GROUP,
        name,
        f"nested_blocksize is {fields['nested_blocksize']}, wanted {SCALE_GROUP}",
    )
    _want(
        fields["nested_dtype"] == "float32",
        name,
        f"nested_dtype is {fields['nested_dtype']!r}, wanted 'float32'",
    )
    absmax = state[f"{name}.absmax"]
    offset = torch.tensor([fields["nested_offset"]], dtype=torch.float32, device=absmax.device)
    groups, table = state[f"{name}.nested_absmax"], state[f"{name}.nested_quant_map"]
    return [_as_bytes(t) for t in (absmax, groups, table, offset)]


def from_bitsandbytes(state: Mapping[str, torch.Tensor], name: str = "weight") -> PackedWeight:
    """The weight `name` of a state dict that bitsandbytes wrote, nested or not, of any quant_storage.

    The tensors of the result are views of those in `state`; nothing is repacked.
    """
    fmt, fields = _find_state(state, name)
    block, shape = fields["blocksize"], tuple(fields["shape"])
    _want(fields["dtype"] in _DTYPES, name, f"dtype is {fields['dtype']!r}, wanted one of {sorted(_DTYPES)}")
    fmt.check_block(block)
    if f"{name}.quant_map" in state:
        _check_map(fmt, state[f"{name}.quant_map"], name)
    nested = "nested_blocksize" in fields
    scales = _nested_scales(state, name, fields) if nested else [_as_bytes(state[f"{name}.absmax"])]
    elements = prod(shape)
    blocks = -(-elements // block)
    wanted = blocks if nested else 4 * blocks
    _want(scales[0].numel() == wanted, name, f"absmax has {scales[0].numel()} bytes, wanted {wanted}")
    values = _as_bytes(state[name])
    bytes_wanted = (elements + 1) // 2
    _want(values.numel() == bytes_wanted, name, f"has {values.numel()} bytes, wanted {bytes_wanted}")
    values, packed_scales = canonical(shape, block, values, scales)
    return PackedWeight(fmt, shape, block, values, packed_scales, _DTYPES[fields["dtype"]])


def to_bitsandbytes(
    weight: PackedWeight, name: str = "weight", quant_storage: torch.dtype = torch.uint8
) -> dict[str, torch.Tensor]:
    """The state-dict entries that bitsandbytes would write for this weight."""
    known = ", ".join(ABSMAX_FORMATS)
    _want(
        weight.format.name in ABSMAX_FORMATS, name, f"format is {weight.format.name}, wanted one of {known}"
    )
    _want(
        weight.origin == 0 and not weight.grid_rows,
        name,
        f"it begins {weight.origin} elements after its bytes, in grids of {weight.grid_rows} rows; wanted a "
        "whole weight: mg.quantize(part.dequantize(dtype), ...)",
    )
    values = weight.values.reshape(-1).view(quant_storage).reshape(-1, 1)
    parts = packed_state(weight, weight.dtype).as_dict(packed=True)
    parts["quant_map"] = parts["quant_map"].clone()  # safetensors refuses tensors that share memory
    return {name: values, **{f"{name}.{part}": tensor for part, tensor in parts.items()}}


def from_quant_state(tensor: torch.Tensor, quant_state: Any) -> PackedWeight:
    """A live bitsandbytes parameter: its packed tensor and its QuantState. The bytes are views of them."""
    refuse_rearranged(quant_state)
    parts = {f"weight.{key}": value for key, value in quant_state.as_dict(packed=True).items()}
    return from_bitsandbytes({"weight": tensor.detach().as_subclass(torch.Tensor), **parts})


class BitsAndBytes(QuantMethod):
    """4-bit weights; the rest of a model is dense."""

    name = "bitsandbytes"
    methods = ("bitsandbytes",)
    saves = ("nf4", "fp4")
    parts = (
        *("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
        *(f"weight.{_STATE}nf4", f"weight.{_STATE}fp4"),
    )

    def formats(self, config: Mapping[str, Any]) -> list[str]:
        if not config.get("load_in_4bit"):
            raise ValueError("load_in_4bit is not set, wanted a 4-bit checkpoint")
        return [config.get("bnb_4bit_quant_type", "fp4")]

    def pack(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> PackedWeight | None:
        return None if len(tensors) == 1 else from_bitsandbytes(tensors, "weight")

    def unpack(self, weight: PackedWeight) -> dict[str, torch.Tensor]:
        return to_bitsandbytes(weight, "weight")

    def config(self, chosen: Quantization) -> Config:
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "_load_in_4bit": True,
            "_load_in_8bit": False,
            "bnb_4bit_quant_type": chosen.format,
            "bnb_4bit_use_double_quant": chosen.double_quant,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
            "llm_int8_skip_modules": None if chosen.dense is None else list(chosen.dense),
            "llm_int8_threshold": 6.0,
        }

    def saved_again(self, config: Mapping[str, Any], dense: Sequence[str]) -> Config:
        again = dict(config) | {"bnb_4bit_quant_storage": "uint8"}
        if dense:
            again["llm_int8_skip_modules"] = listed(config.get("llm_int8_skip_modules"), dense)
        return again
