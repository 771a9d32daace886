"""Quantises and exports a folder with NVIDIA ModelOpt, and writes what ModelOpt dequantises it to.

modelopt_export.py SOURCE FOLDER LAYER_TO_LEAVE_DENSE ALGORITHM ...       # FOLDER/ALGORITHM{/,.dense}
"""

from __future__ import annotations

import copy
import pathlib
import sys
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.export.quant_utils import from_quantized_weight
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


def quantize(source: str | pathlib.Path, folder: str | pathlib.Path, algorithm: str, dense: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    name = algorithm if algorithm == "FP8_PER_CHANNEL_PER_TOKEN" else f"{algorithm}_DEFAULT"
    config = copy.deepcopy(getattr(mtq, f"{name}_CFG"))
    config["quant_cfg"].append({"quantizer_name": f"*{dense}*", "enable": False})
    mtq.quantize(model, config, forward_loop=lambda model: model(torch.arange(24)[None]))
    export_hf_checkpoint(model, export_dir=folder)


def dequantized(folder: str | pathlib.Path) -> dict[str, torch.Tensor]:
    state, found = load_file(f"{folder}/model.safetensors"), {}
    for name, scale in state.items():
        layer = name.removesuffix(".weight_scale")
        if layer == name:
            continue
        weight = state[f"{layer}.weight"]
        if weight.dtype == torch.uint8:
            tensor = NVFP4QTensor(torch.Size((weight.shape[0], 2 * weight.shape[1])), torch.bfloat16, weight)
            double = state[f"{layer}.weight_scale_2"]
            options = {"scale": scale, "double_scale": double, "block_sizes": {-1: 16}}
            found[layer] = tensor.dequantize(torch.bfloat16, **options)
        elif scale.dtype == torch.uint8:
            tensor = MXFP8QTensor(weight.shape, torch.bfloat16, weight)
            found[layer] = tensor.dequantize(torch.bfloat16, scale=scale)
        else:  # in fp32: asked for bf16, it rounds the scale first, and the product again
            scale = scale[:, None] if scale.dim() == 1 else scale
            values = from_quantized_weight(weight, scale, "fp8", torch.float32)
            found[layer] = values.to(torch.bfloat16)
    return found


if __name__ == "__main__":
    source, folder, dense, *algorithms = sys.argv[1:]
    for algorithm in algorithms:
        quantize(source, f"{folder}/{algorithm}", algorithm, dense)
        save_file(dequantized(f"{folder}/{algorithm}"), f"{folder}/{algorithm}.dense")
