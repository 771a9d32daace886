"""compressed-tensors (llm-compressor, vLLM): `weight_packed` or `weight`, beside `weight_scale`.

    {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {...}, ...}},
     "format": "nvfp4-pack-quantized", "quantization_status": "compressed", "ignore": ["lm_head"]}

| weights in a group | tensors | format |
|---|---|---|
| float, 4 bits, tensor_group of 16 | weight_packed, weight_scale E4M3, weight_global_scale | nvfp4-divide |
| float, 4 bits, group of 32 | weight_packed, weight_scale bytes | mxfp4 |
| float, 8 bits, group of 32 | weight E4M3, weight_scale bytes | mxfp8 |
| float, 8 bits, block of [128, 128] | weight E4M3, weight_scale fp32 or bf16 | fp8-block |
| float, 8 bits, channel or tensor | weight E4M3, weight_scale bf16, fp16 or fp32 | fp8-row-... |
| int, 4 bits, pack-quantized | weight_packed int32, weight_{scale,shape,zero_point} | int4-... |
| int, 8 bits, pack-quantized | the same | int8-packed-... |
| int, 8 bits, int-quantized | weight int8, weight_scale, weight_zero_point | int8-... |

Integers have scales of groups or rows, those that are int-quantized also one for all. The type of the scales,
which ends the name of the last four, is that of the tensor. `weight_g_idx`, columns in another order, is
refused. `weight_global_scale` is fp32 and divides. Groups may differ from layer to layer ("mixed-precision").
What a group says of activations, `input_global_scale` and the KV cache concern serving and are not used here:
only the weights are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from monograph.ops.formats import GROUP_CODES, BlockShape
from monograph.quant.packed_weight import PackedWeight
from monograph.quant.quant_methods.element_tensors import (
    DENSE,
    e4m3_weight,
    element_weight,
    stored_scales,
    stored_values,
)
from monograph.quant.quant_methods.group_tensors import (
    fp8_rows,
    has_row_scales,
    int8_weight,
    packed_integers,
    stored_groups,
)
from monograph.quant.quant_methods.quant_method import Config, Quantization, QuantMethod, listed
from monograph.quant.sorted_columns import refuse_columns


def _weights(bits: int, strategy: str, **options: Any) -> dict[str, Any]:
    """The arguments of a scheme's weights, as the library writes them."""
    fixed = {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
    return {"group_size": None, **fixed, **options}


# Format: the library's name of the way of storing it, and the arguments.
_SCHEMES = {
    "nvfp4-divide": (
        "nvfp4-pack-quantized",
        _weights(4, "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn"),
    ),
    "mxfp4": ("mxfp4-pack-quantized", _weights(4, "group", group_size=32, scale_dtype="torch.uint8")),
    "mxfp8": ("mxfp8-quantized", _weights(8, "group", group_size=32, scale_dtype="torch.uint8")),
    "fp8-block": ("float-quantized", _weights(8, "block", block_structure=[128, 128])),
}
_MEANING = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure")


def _group_scheme(format: str, group: int, symmetric: bool) -> tuple[str, dict[str, Any]] | None:
    """The same of int4, int8 and fp8, stored as the library stores weights alone; `group` 0 is the row."""
    if format not in GROUP_CODES:
        return None
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    kind = "float" if format == "fp8" else "int"
    options = {"type": kind, "symmetric": symmetric, "actorder": None, **strategy}
    weights = _weights(4 if format == "int4" else 8, "channel") | options
    return ("float-quantized" if format == "fp8" else "pack-quantized"), weights


def _group_code(found: Mapping[str, Any]) -> str | None:
    """The code of a scheme with scales of rows or groups of them; None for another scheme."""
    kind, bits, strategy = (found[key] for key in ("type", "num_bits", "strategy"))
    grouped = strategy == "group" and isinstance(found["group_size"], int) and found["group_size"] > 0
    if found["block_structure"] is not None or not (grouped or found["group_size"] in (None, -1)):
        return None
    if kind == "float":
        by_row = strategy in ("channel", "tensor") and bits == 8 and found["symmetric"]
        return "fp8-row" if by_row else None
    if kind != "int" or bits not in (4, 8) or not (grouped or strategy in ("channel", "tensor")):
        return None
    return "int4" if bits == 4 else "int8"


def _format_of(weights: Mapping[str, Any], where: str) -> str:
    found = {key: weights.get(key) for key in _MEANING} | {"symmetric": weights.get("symmetric", True)}
    for format, (_, scheme) in _SCHEMES.items():
        if all(scheme.get(key) == value for key, value in found.items()):
            return format
    if weights.get("actorder") in ("group", True):
        kind = weights["actorder"]
        raise ValueError(f"{where}: actorder is {kind!r}, wanted none or 'weight': weight_g_idx is not read")
    code = _group_code(found)
    if code is not None:
        return f"{code}-bf16"  # for any: the tensors tell the type of the scales
    raise ValueError(
        f"{where}: weights are {found}; wanted symmetric float in groups of 16 (NVFP4) or 32 (MXFP4, MXFP8), "
        "in blocks of [128, 128], rows or one (FP8), or int of 4 or 8 bits in groups or rows"
    )


class CompressedTensors(QuantMethod):
    name = "compressed-tensors"
    methods = ("compressed-tensors",)
    saves: tuple[str, ...] = ("mxfp4", "mxfp8", "nvfp4-divide", "int4", "int8", "fp8")
    parts = (
        *("weight", "weight_packed", "weight_scale", "weight_global_scale", "weight_zero_point"),
        *("weight_shape", "weight_g_idx", "weight_columns"),
        *("input_scale", "input_global_scale", "input_zero_point"),
    )

    def formats(self, config: Mapping[str, Any]) -> list[str]:
        if config.get("quantization_status") != "compressed":
            found = config.get("quantization_status")
            raise ValueError(f"quantization_status is {found!r}, wanted 'compressed'")
        for key in ("transform_config", "sparsity_config"):
            value = config.get(key) or {}
            if value and value.get("format") != "dense":
                raise ValueError(f"{key} is {value}, wanted none: it changes what a layer computes")
        found_formats: list[str] = []
        for name, group in (config.get("config_groups") or {}).items():
            if not isinstance(group, Mapping):
                raise ValueError(f"config_groups.{name} is {group!r}, wanted a scheme with its weights")
            if group.get("weights") is not None:
                format = _format_of(group["weights"], f"config_groups.{name}")
                found_formats = listed(found_formats, [format])
        if not found_formats:
            raise ValueError("config_groups has no group with weights, wanted at least one")
        return found_formats

    def pack(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> PackedWeight | None:
        weight, packed, scale = (tensors.get(name) for name in ("weight", "weight_packed", "weight_scale"))
        if packed is None and scale is None and weight is not None and weight.dtype in DENSE:
            return None
        if "weight_g_idx" in tensors:
            raise ValueError("there is a weight_g_idx, columns in another order; wanted none")
        refuse_columns(tensors, self.methods[0])
        zero = tensors.get("weight_zero_point")
        if scale is not None and packed is not None and weight is None and "weight_shape" in tensors:
            return packed_integers(packed, scale, tensors["weight_shape"], zero, dtype)
        if scale is not None and packed is None and weight is not None and weight.dtype == torch.int8:
            return int8_weight(weight, scale, zero, dtype)
        if scale is None or (packed is None) == (weight is None) or zero is not None:
            raise ValueError(
                f"found {sorted(tensors)}, wanted weight_packed or weight, weight_scale, no zero point"
            )
        if packed is not None:
            if packed.dtype != torch.uint8:
                raise ValueError(f"weight_packed is {packed.dtype}, wanted torch.uint8")
            global_scale = tensors.get("weight_global_scale")
            format = "mxfp4" if global_scale is None else "nvfp4-divide"
            return element_weight(format, packed, scale, dtype, global_scale)
        assert weight is not None
        if weight.dtype != torch.float8_e4m3fn:
            wanted = "wanted torch.float8_e4m3fn or torch.int8"
            raise ValueError(f"weight is {weight.dtype} beside weight_scale, {wanted}")
        if has_row_scales(weight, scale):
            return fp8_rows(weight, scale, dtype)
        return e4m3_weight(weight, scale, dtype)

    def check_parts(self, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Without its zero points an asymmetric weight would be read as a symmetric one."""
        groups = [group.get("weights") or {} for group in config["config_groups"].values()]
        integers = [weights for weights in groups if weights.get("type") == "int"]
        asymmetric = bool(integers) and all(weights.get("symmetric") is False for weights in integers)
        words = "weight_packed" in tensors and "weight_shape" in tensors
        packed = words or ("weight" in tensors and tensors["weight"].dtype == torch.int8)
        if asymmetric and packed and "weight_zero_point" not in tensors:
            raise ValueError("config_groups says symmetric: false, wanted weight_zero_point; there is none")

    def unpack(self, weight: PackedWeight) -> dict[str, torch.Tensor]:
        if weight.columns is not None:
            raise ValueError(f"the weight is {weight!r}, which {self.name} has no name for")
        if weight.format.shape is BlockShape.GROUP:
            return stored_groups(weight)
        name = "weight" if weight.format.bits == 8 else "weight_packed"
        found = {name: stored_values(weight), "weight_scale": stored_scales(weight)}
        if weight.format.tensor_scale:
            found["weight_global_scale"] = weight.scales[1].clone().view(torch.float32)
        return found

    def config(self, chosen: Quantization) -> Config:
        groups = _group_scheme(chosen.format, chosen.block_size, chosen.symmetric)
        name, weights = groups or _SCHEMES[chosen.format]
        scheme: Config = {"targets": ["Linear"], "weights": dict(weights), "format": name}
        scheme |= {"input_activations": None, "output_activations": None}
        return {
            "config_groups": {"group_0": scheme},
            "quant_method": "compressed-tensors",
            "kv_cache_scheme": None,
            "format": name,
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "ignore": ["lm_head"] if chosen.dense is None else list(chosen.dense),
        }

    def saved_again(self, config: Mapping[str, Any], dense: Sequence[str]) -> Config:
        nothing = dict.fromkeys(("input_activations", "output_activations"))
        groups = {name: {**group, **nothing} for name, group in config["config_groups"].items()}
        again = dict(config) | {"config_groups": groups, "kv_cache_scheme": None}
        return again | {"ignore": listed(config.get("ignore"), dense)}
