"""Model folders as transformers (fp8), compressed-tensors and ModelOpt write them, from a dense source.

Each function gives what the producer itself makes of the packed weights again: {layer: dense weight}.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from support.tiny_models import tiny_llama

DENSE = ("lm_head", "model.layers.0.mlp.down_proj")  # what the producers are told to leave alone
MODELOPT = ("NVFP4", "MXFP8", "FP8", "FP8_PER_CHANNEL_PER_TOKEN")  # its algorithms that load


def make_source(folder: pathlib.Path, **sizes: Any) -> pathlib.Path:
    """A bf16 Llama whose rows and columns differ in magnitude, so that no two scales are alike."""
    settings = {"hidden_size": 256, "intermediate_size": 384, "vocab_size": 256, "attention_bias": True}
    model = tiny_llama(dtype=torch.bfloat16, **(settings | sizes))
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.weight"):
            rows = torch.exp2(torch.randint(-4, 5, (parameter.shape[0], 1)) + torch.rand(1))
            columns = torch.exp2(torch.randint(-2, 3, (1, parameter.shape[1])) + torch.rand(1))
            parameter.data *= (rows * columns).to(torch.bfloat16)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    return folder


def tensors(folder: str | pathlib.Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def linear_weights(model: Any) -> dict[str, torch.Tensor]:
    linears = (torch.nn.Linear,)
    return {
        name: layer.weight.detach() for name, layer in model.named_modules() if isinstance(layer, linears)
    }


def write_folder(source: pathlib.Path, folder: pathlib.Path, state: Any, quantization_config: Any) -> None:
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": quantization_config}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")


def transformers_fp8(
    source: pathlib.Path, folder: pathlib.Path, scale: str = "float32"
) -> dict[str, torch.Tensor]:
    """By transformers' own operation; its quantizer as a whole wants a GPU. It dequantises on a CPU."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    config = FineGrainedFP8Config(
        modules_to_not_convert=list(DENSE), scale_fmt="ue8m0" if scale == "e8m0" else "float"
    )
    quantize: Any = Fp8Quantize(SimpleNamespace(quantization_config=config))
    state = tensors(source)
    for name in [name for name in state if name.endswith("_proj.weight")]:
        if name.removesuffix(".weight") in DENSE:
            continue
        state |= quantize.convert({name: state[name]})
        if scale == "bfloat16":
            state[f"{name}_scale_inv"] = state[f"{name}_scale_inv"].to(torch.bfloat16)
    write_folder(source, folder, state, config.to_dict())
    return linear_weights(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))


def _calibrate(layer: Any) -> None:
    """Scales of one layer by the library's own functions; an observer would call them."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args, weight = layer.quantization_scheme.weights, layer.weight.detach()
    if args.strategy == "block":
        height, width = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % width, 0, -weight.shape[0] % height))
        blocks = padded.reshape(padded.shape[0] // height, height, -1, width)
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    elif args.strategy == "tensor":
        low, high = weight.min().reshape(1), weight.max().reshape(1)
    else:
        blocks = weight.reshape(weight.shape[0], -1, args.group_size or weight.shape[1])
        low, high = blocks.amin(-1), blocks.amax(-1)
    global_scale = None
    if args.strategy == "tensor_group":
        global_scale = generate_gparam(weight.min(), weight.max())
        layer.weight_global_scale.data.copy_(global_scale.reshape(-1))
    if hasattr(layer, "input_global_scale"):
        layer.input_global_scale.data.fill_(1.0)
    scale, zero = calculate_qparams(low, high, args, global_scale)
    layer.weight_scale.data.copy_(scale)
    if not args.symmetric:
        layer.weight_zero_point.data.copy_(zero)


def write_compressed_tensors(source: pathlib.Path, folder: pathlib.Path, presets: Any) -> None:
    """`presets` maps the library's presets to the layers they are for."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    groups = {f"group_{i}": preset_name_to_scheme(*preset) for i, preset in enumerate(presets.items())}
    ignore = ["re:.*lm_head", DENSE[1]]
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=ignore))
    for layer in model.modules():
        if getattr(layer, "quantization_scheme", None) is not None:
            _calibrate(layer)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder, max_shard_size="200KB")
    compressor.update_config(folder)


def compressed_tensors(source: pathlib.Path, folder: pathlib.Path, presets: Any) -> dict[str, torch.Tensor]:
    """One preset for all layers: transformers 5.23 reads a folder by the scheme of its first group."""
    from transformers import CompressedTensorsConfig

    write_compressed_tensors(source, folder, presets)
    options = CompressedTensorsConfig(dequantize=True)
    return linear_weights(
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=options, dtype=torch.bfloat16)
    )


def modelopt(source: pathlib.Path, folder: str | pathlib.Path, algorithm: str) -> dict[str, torch.Tensor]:
    """In a process of its own, one for all algorithms: importing it takes long, and changes transformers."""
    made = source.with_name("modelopt")
    if not made.exists():
        script = pathlib.Path(__file__).with_name("modelopt_export.py")
        command = [sys.executable, str(script), str(source), str(made), DENSE[1], *MODELOPT]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode != 0:
            raise RuntimeError(done.stderr[-2000:])
    shutil.copytree(made / algorithm, folder)
    return load_file(made / f"{algorithm}.dense")


def only_hf_quant_config(folder: str | pathlib.Path, other: pathlib.Path) -> None:
    """A copy that says it is quantised in ModelOpt's own file alone."""
    shutil.copytree(folder, other)
    config = json.loads((other / "config.json").read_text())
    del config["quantization_config"]
    (other / "config.json").write_text(json.dumps(config))
