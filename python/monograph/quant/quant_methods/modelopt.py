"""NVIDIA ModelOpt: `weight` bytes, `weight_scale` and, in NVFP4, `weight_scale_2`, which multiplies.

    {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], ...}     config.json
    {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"], ...}}      hf_quant_config.json

| quant_algo | tensors | format |
|---|---|---|
| NVFP4, W4A16_NVFP4 | weight bytes, weight_scale E4M3, weight_scale_2 fp32 | nvfp4 |
| MXFP8 | weight E4M3, weight_scale bytes | mxfp8 |
| FP8 | weight E4M3, weight_scale one fp32 | fp8-row-fp32 |
| FP8_PER_CHANNEL_PER_TOKEN | weight E4M3, weight_scale [rows] fp32 | fp8-row-fp32 |

Other algorithms are refused although some use the same names: the tensor scale of W4A8_NVFP4_FP8 lacks the
factor 6, and those with AWQ or SVD scale the activations of a layer or add to it. `input_scale` and the
scales of a KV cache concern serving and are not used here: only the weights are.

No algorithm of ModelOpt is FP8 for weights alone, and a server would multiply by the input_scale that is not
there. So a folder of FP8 is saved again as compressed-tensors; one that mixes FP8 with others is not saved.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from monograph.ops.formats import BlockShape
from monograph.quant.packed_weight import PackedWeight
from monograph.quant.quant_methods.compressed_tensors import CompressedTensors
from monograph.quant.quant_methods.element_tensors import (
    DENSE,
    e4m3_weight,
    element_weight,
    stored_scales,
    stored_values,
)
from monograph.quant.quant_methods.group_tensors import fp8_rows, has_row_scales, stored_groups
from monograph.quant.quant_methods.quant_method import Config, Quantization, QuantMethod, listed

_ALGORITHMS = {"NVFP4": "nvfp4", "W4A16_NVFP4": "nvfp4", "MXFP8": "mxfp8"}
# By strategy of compressed-tensors. The type of the scales is that of the tensor.
_FP8 = {"FP8": "tensor", "FP8_PER_CHANNEL_PER_TOKEN": "channel"}
_FP8_FORMAT = "fp8-row-fp32"
_GROUP_SIZES = {"nvfp4": (None, 16), "mxfp8": (None, 32), _FP8_FORMAT: (None, 0)}


def _details(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that names the algorithm: hf_quant_config.json has it one level down."""
    return config.get("quantization") or config


def _layers(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    details = _details(config)
    if details.get("quant_algo") == "MIXED_PRECISION":
        return list(details.get("quantized_layers", {}).values())
    return [details]


def _weights_alone(layer: Mapping[str, Any]) -> str:
    return "W4A16_NVFP4" if layer["quant_algo"] == "NVFP4" else layer["quant_algo"]


def _compressed(details: Mapping[str, Any], dense: Sequence[str]) -> Config:
    """compressed-tensors' quantization_config of the same FP8 weights, alone."""
    ignored = details.get("ignore", details.get("exclude_modules")) or ()
    patterns = ["re:" + fnmatch.translate(name) if "*" in name else name for name in ignored]
    config = CompressedTensors().config(Quantization("fp8", dense=listed(patterns, dense)))
    weights = config["config_groups"]["group_0"]["weights"]
    weights["strategy"] = _FP8[details["quant_algo"]]
    return config


class ModelOpt(QuantMethod):
    name = "ModelOpt"
    methods = ("modelopt", "modelopt_fp4", "modelopt_mxfp8")
    parts = ("weight", "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")

    def formats(self, config: Mapping[str, Any]) -> list[str]:
        found: list[str] = []
        wanted = ", ".join((*_ALGORITHMS, *_FP8))
        for layer in _layers(config):
            algorithm, group = layer.get("quant_algo"), layer.get("group_size")
            format = _FP8_FORMAT if algorithm in _FP8 else _ALGORITHMS.get(str(algorithm))
            if format is None:
                raise ValueError(f"quant_algo is {algorithm}, wanted one of {wanted}")
            if group not in _GROUP_SIZES[format]:
                size = _GROUP_SIZES[format][1] or "none"
                raise ValueError(f"group_size of {algorithm} is {group}, wanted {size}")
            found = listed(found, [format])
        if not found:
            raise ValueError(f"quantized_layers is empty, wanted layers in one of {wanted}")
        return found

    def pack(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> PackedWeight | None:
        weight, scale = tensors.get("weight"), tensors.get("weight_scale")
        if weight is None or (scale is None and weight.dtype not in DENSE):
            raise ValueError(f"found {sorted(tensors)}, wanted weight and weight_scale")
        if "pre_quant_scale" in tensors:
            raise ValueError("there is a pre_quant_scale, which scales activations; wanted none")
        if scale is None:
            return None
        if weight.dtype == torch.float8_e4m3fn:
            if scale.dtype in DENSE and has_row_scales(weight, scale):
                return fp8_rows(weight, scale, dtype)
            return e4m3_weight(weight, scale, dtype)
        if weight.dtype != torch.uint8:
            raise ValueError(f"weight is {weight.dtype} beside weight_scale, wanted uint8 or float8_e4m3fn")
        return element_weight("nvfp4", weight, scale, dtype, tensors.get("weight_scale_2"))

    def unpack(self, weight: PackedWeight) -> dict[str, torch.Tensor]:
        if weight.format.shape is BlockShape.GROUP:
            return stored_groups(weight)
        found = {"weight": stored_values(weight), "weight_scale": stored_scales(weight)}
        if weight.format.tensor_scale:
            found["weight_scale_2"] = weight.scales[1].clone().view(torch.float32).reshape(())
        return found

    def check_saved(self, config: Mapping[str, Any]) -> None:
        algorithms = {str(layer.get("quant_algo")) for layer in _layers(config)}
        if algorithms & _FP8.keys() and _details(config).get("quant_algo") == "MIXED_PRECISION":
            raise ValueError(
                f"quantized_layers mixes {', '.join(sorted(algorithms))}: ModelOpt has no name for FP8 "
                "without scales of activations; save the adapter alone, or the merged model"
            )

    def saved_again(self, config: Mapping[str, Any], dense: Sequence[str]) -> Config:
        """Weights alone: NVFP4 without its input scales is what ModelOpt calls W4A16_NVFP4."""
        details = _details(config)
        if details.get("quant_algo") in _FP8:
            return _compressed(details, dense)
        again = {key: config[key] for key in ("producer",) if key in config} | {"quant_method": "modelopt"}
        again["ignore"] = listed(details.get("ignore", details.get("exclude_modules")), dense)
        again["quant_algo"] = _weights_alone(details)
        if "group_size" in details:
            again["group_size"] = details["group_size"]
        if "quantized_layers" in details:
            again["quantized_layers"] = {
                name: dict(layer) | {"quant_algo": _weights_alone(layer)}
                for name, layer in details["quantized_layers"].items()
            }
        groups = details.get("config_groups")
        if groups:
            again["config_groups"] = {
                name: {key: value for key, value in group.items() if key != "input_activations"}
                for name, group in groups.items()
            }
        return again
