"""Eight billion parameters: three steps of a Llama-3.1-8B in NF4, r = 16 on all linears, 1024 tokens.

    python -m monograph.bench large_model --folder /some/folder --json

The weights are random numbers, quantised and written layer by layer to `--folder` (5.8 GB) unless they are
there already; training maps them from the file. Takes minutes; `--quick` uses two layers.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from monograph.bench.report import Report

if TYPE_CHECKING:
    from monograph.training import TrainStep

SIZES: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
TOKENS, STEPS = 1024, 3


def write_model(folder: pathlib.Path, layers: int, **sizes: Any) -> None:
    """The folder of an NF4 model, one file a layer, never more than one layer in memory. sizes: of its
    config, where they are not SIZES."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import monograph as mg

    config = LlamaConfig(**(SIZES | sizes), num_hidden_layers=layers, dtype="bfloat16")
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in LlamaForCausalLM(config).named_parameters()}
    groups: dict[str, list[str]] = {}
    for name in shapes:
        parts = name.split(".")
        groups.setdefault(f"layer-{int(parts[2]):02}" if parts[1] == "layers" else parts[-2], []).append(name)
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    generator = torch.Generator().manual_seed(0)
    for number, names in enumerate(groups.values()):
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            if len(shapes[name]) == 1:
                tensors[name] = torch.ones(shapes[name], dtype=torch.bfloat16)
                continue
            weight = torch.randn(shapes[name], generator=generator).mul_(0.02).bfloat16()
            if name.endswith("_proj.weight"):
                tensors |= mg.to_bitsandbytes(mg.quantize(weight, double_quant=True), name)
            else:
                tensors[name] = weight
        file = f"model-{number + 1:05}-of-{len(groups):05}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
        index |= dict.fromkeys(tensors, file)
    config.architectures = ["LlamaForCausalLM"]
    config.quantization_config = mg.MonographConfig("nf4", double_quant=True).to_dict()
    config.save_pretrained(folder)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)


def _status(key: str) -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 2**20 for line in file if line.startswith(key + ":"))


def timed_steps(step: TrainStep, tokens: int, lengths: Sequence[int], vocabulary: int) -> dict[str, float]:
    """Steps on rows of `tokens` with drawn documents of these lengths: seconds, losses, norms."""
    from monograph.packing import PackedCollator

    numbers: dict[str, float] = {}
    generator = torch.Generator().manual_seed(1)
    collate = PackedCollator(pad_to_multiple_of=tokens, max_documents=8)
    for number in range(1, STEPS + 1):
        ids = [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in lengths]
        began = time.perf_counter()
        result = step([collate([{"input_ids": row} for row in ids])], 1e-4)
        numbers[f"step_{number}_seconds"] = time.perf_counter() - began
        numbers[f"step_{number}_loss"] = result.loss.item()
        numbers[f"step_{number}_grad_norm"] = result.grad_norm.item()
    return numbers


def run(arguments: argparse.Namespace, report: Report) -> None:
    from peft import LoraConfig

    import monograph as mg
    from monograph.training import TrainStep

    layers = 2 if arguments.quick else 32
    folder = pathlib.Path(arguments.folder or "build/large-model")
    if not (folder / "model.safetensors.index.json").exists():
        began = time.perf_counter()
        write_model(folder, layers)
        print(f"# wrote {folder} in {time.perf_counter() - began:.0f} s", flush=True)
    numbers: dict[str, float] = {}
    began = time.perf_counter()
    model = mg.from_pretrained(folder)
    numbers["load_seconds"] = time.perf_counter() - began
    numbers["parameters"] = sum(
        layer.in_features * layer.out_features
        for layer in model.modules()
        if isinstance(layer, torch.nn.Linear)
    )
    model.gradient_checkpointing_enable()
    wrapped = mg.add_lora(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    step = TrainStep(wrapped, mode=arguments.mode, dynamic=False)
    numbers |= timed_steps(step, TOKENS, [350, 350, 324], SIZES["vocab_size"])
    numbers["peak_rss_gib"] = _status("VmHWM")
    numbers["anonymous_gib"] = _status("RssAnon")
    report.summary(numbers)
