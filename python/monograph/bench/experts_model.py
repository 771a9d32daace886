"""gpt-oss-20b's shapes on 24 GiB: three steps, r = 4 on attention and experts, 256 tokens, checkpointed.

    python -m monograph.bench experts_model --folder /some/folder --json

24 layers, 2880 wide, 32 experts of which a token takes 4, a vocabulary of 201,088. The experts are random
bytes in the spelling of the shipped folder (MXFP4, `_blocks` and `_scales`), the rest is bf16; written layer
by layer to `--folder` (13 GB) unless they are there already. Training maps them: `resident` is the high-water
mark of this process from its start, `anonymous` what it holds at the end beyond pages of files, `mapped` the
share of the experts' bytes that lie in the mapped files. `--quick` uses two layers.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import save_file

from monograph.bench.large_model import _status, timed_steps
from monograph.bench.report import Report

LAYERS, TOKENS, RANK = 24, 256, 4
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
STACKS = ("experts.gate_up_proj", "experts.down_proj")


def _config(layers: int) -> Any:
    from transformers import GptOssConfig

    return GptOssConfig(num_hidden_layers=layers, num_local_experts=32, dtype="bfloat16")


def _tensors(name: str, shape: torch.Size, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """What the shipped folder has for one parameter, at random."""
    if name.endswith(STACKS):
        count, cols, rows = shape  # the module's parameter is the transpose of what is stored
        groups = cols // 32
        # Weights of some 0.02.
        exponents = torch.randint(118, 122, (count, rows, groups), dtype=torch.uint8, generator=generator)
        words = torch.randint(
            -(2**63), 2**63 - 1, (count, rows, groups, 2), dtype=torch.int64, generator=generator
        )
        return {f"{name}_blocks": words.view(torch.uint8), f"{name}_scales": exponents}
    if "norm" in name:
        return {name: torch.ones(shape, dtype=torch.bfloat16)}
    # One draw again and again: a head of a gigabyte would take a minute.
    some = torch.empty(1 << 20).normal_(std=0.02, generator=generator).bfloat16()
    return {name: some.repeat(shape.numel() // len(some) + 1)[: shape.numel()].reshape(shape)}


def write_model(folder: pathlib.Path, layers: int) -> None:
    """A folder like the shipped one, a file a layer, never more than one in memory."""
    from transformers import GptOssForCausalLM

    config = _config(layers)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in GptOssForCausalLM(config).named_parameters()}
    groups: dict[str, list[str]] = {}
    for name in shapes:
        parts = name.split(".")
        groups.setdefault(parts[2] if parts[1] == "layers" else name, []).append(name)
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    generator = torch.Generator().manual_seed(0)
    for number, names in enumerate(groups.values()):
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            tensors |= _tensors(name, shapes[name], generator)
        file = f"model-{number + 1:05}-of-{len(groups):05}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    config.architectures = ["GptOssForCausalLM"]
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    config.save_pretrained(folder)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)


def _mapped(folder: pathlib.Path, tensors: Sequence[torch.Tensor]) -> float:
    """The share of the bytes of `tensors` that lie in mappings of the folder's files."""
    spans = []
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        if str(folder.resolve()) in line:
            first, last = line.split()[0].split("-")
            spans.append((int(first, 16), int(last, 16)))
    inside = [
        t.nbytes for t in tensors if any(a <= t.data_ptr() and t.data_ptr() + t.nbytes <= b for a, b in spans)
    ]
    return sum(inside) / sum(t.nbytes for t in tensors)


def run(arguments: argparse.Namespace, report: Report) -> None:
    from peft import LoraConfig

    import monograph as mg
    from monograph.nn.packed_experts import PackedExperts
    from monograph.training import TrainStep

    layers = 2 if arguments.quick else LAYERS
    folder = pathlib.Path(arguments.folder or "build/experts-model")
    if not (folder / "model.safetensors.index.json").exists():
        began = time.perf_counter()
        write_model(folder, layers)
        print(f"# wrote {folder} in {time.perf_counter() - began:.0f} s", flush=True)
    torch.set_num_threads(arguments.threads[-1])
    numbers: dict[str, float] = {"layers": layers, "tokens": TOKENS, "rank": RANK}
    began = time.perf_counter()
    model = mg.from_pretrained(folder)
    numbers["load_seconds"] = time.perf_counter() - began
    packed = [layer for layer in model.modules() if isinstance(layer, PackedExperts)]
    stacks = [
        tensor
        for layer in packed
        for name, tensor in layer.named_parameters()
        if name.endswith(("_values", "_scales"))
    ]
    numbers["experts_gib"] = sum(t.nbytes for t in stacks) / 2**30
    numbers["mapped"] = _mapped(folder, stacks)
    model.gradient_checkpointing_enable()
    config = LoraConfig(r=RANK, target_modules=list(MODULES), task_type="CAUSAL_LM")
    wrapped = mg.add_lora(model, config, experts=True)
    numbers["trained_parameters"] = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
    step = TrainStep(wrapped, mode=arguments.mode, dynamic=False)
    numbers |= timed_steps(step, TOKENS, (100, 96, 60), model.config.vocab_size)
    numbers["resident_gib"] = _status("VmHWM")
    numbers["anonymous_gib"] = _status("RssAnon")
    report.summary(numbers)
