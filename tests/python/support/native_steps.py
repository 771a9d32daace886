"""Steps of the native trainer and of TrainStep on the same batches, from the same adapter."""

from __future__ import annotations

import json
import pathlib
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file

import monograph as mg
from monograph.packing import PackedCollator, PaddedCollator
from monograph.training import TrainStep
from support.native_tool import program, run

FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "gemma3_text": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
}
VOCABULARY = 256
# Of "qwen3_moe": what `quantize` needs, the native trainer's targets, and a small mixture.
STACKED = ("nf4", "--double-quant", "--experts", "stack")
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MIXTURE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "initializer_range": 0.1,  # routers that tell tokens apart
}
STEP = {"weight_decay": 0.01, "max_grad_norm": 0.5, "seed": 7}
RATE = 1e-2

Batches = Sequence[Sequence[Mapping[str, Any]]]  # of each step its micro-batches


def make_base(
    folder: pathlib.Path, family: str, to: Sequence[str] | None, dtype: torch.dtype, **changes: Any
) -> pathlib.Path:
    """A model of two layers with random weights; quantised by the tool if there are options for it."""
    config_class, model_class = FAMILIES[family]
    settings: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
    }
    torch.manual_seed(1)
    model = model_class(config_class(**(settings | changes))).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                one = 0 if family == "gemma3_text" else 1  # there 1 is added to the weight
                parameter.copy_(one + 0.1 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(0.1 * torch.randn_like(parameter))
    dense = folder / "dense"
    model.save_pretrained(dense)
    if to is None:
        return dense
    run("quantize", dense, folder / "base", "--to", *to)
    return folder / "base"


def documents(count: int, seed: int = 3) -> list[dict[str, list[int]]]:
    """Of 1 to 40 tokens; the first few of some are no targets."""
    torch.manual_seed(seed)
    found = []
    for number in range(count):
        ids = torch.randint(0, VOCABULARY, (int(torch.randint(1, 41, ())),)).tolist()
        hidden = number % 3
        found.append({"input_ids": ids, "labels": [-100] * min(hidden, len(ids)) + ids[hidden:]})
    return found


def packed(steps: int, micro_batches: int = 1, length: int = 96) -> Batches:
    collate = PackedCollator(pad_to_multiple_of=length, max_documents=6)
    rows = iter(documents(steps * micro_batches * 3))
    return [[collate([next(rows) for _ in range(3)]) for _ in range(micro_batches)] for _ in range(steps)]


def padded(steps: int, micro_batches: int = 1, rows: int = 3) -> Batches:
    collate = PaddedCollator(pad_to_multiple_of=8)
    given = iter(documents(steps * micro_batches * rows))
    return [[collate([next(given) for _ in range(rows)]) for _ in range(micro_batches)] for _ in range(steps)]


@dataclass
class Case:
    base: pathlib.Path
    dtype: torch.dtype
    batches: Batches
    dropout: float = 0.0
    rank: int = 8
    targets: Any = "all-linear"
    leaves: int | None = None
    rank_pattern: dict[str, int] = field(default_factory=dict)
    step: dict[str, Any] = field(default_factory=dict)


def start(case: Case, folder: pathlib.Path) -> pathlib.Path:
    """An adapter whose B is not zero."""
    if not folder.exists():
        model = mg.from_pretrained(case.base, dtype=case.dtype)
        torch.manual_seed(2)
        config = LoraConfig(
            r=case.rank,
            lora_alpha=12,
            lora_dropout=case.dropout,
            target_modules=case.targets,
            rank_pattern=case.rank_pattern,
        )
        adapted: Any = mg.add_lora(model, config)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.02)
        adapted.save_pretrained(folder)
    return folder


def python_steps(case: Case, adapter: pathlib.Path, mode: str) -> dict[str, torch.Tensor]:
    model: Any = mg.from_pretrained(case.base, dtype=case.dtype)
    model.gradient_checkpointing_enable()
    model = PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
    mg.optimize(model)
    step = TrainStep(model, mode=mode, virtual_shards=case.leaves, **(STEP | case.step))
    results = [step(micro_batches, RATE) for micro_batches in case.batches]
    return {
        "loss": torch.stack([result.loss for result in results]),
        "norm": torch.stack([result.grad_norm for result in results]),
        **{name: getattr(step.state, name) for name in ("flat", "exp_avg", "exp_avg_sq")},
    }


def native_steps(
    case: Case, adapter: pathlib.Path, folder: pathlib.Path, *, threads: int = 2, recompute: bool = True
) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for step, micro_batches in enumerate(case.batches):
        for number, batch in enumerate(micro_batches):
            tensors |= {f"{step}.{number}.{name}": t for name, t in _native_batch(batch).items()}
    save_file(tensors, folder / "batches.safetensors")
    settings = {
        **(STEP | case.step),
        "threads": threads,
        "recompute": recompute,
        "steps": len(case.batches),
        "learning_rate": RATE,
        "dropout": case.dropout,
        "leaves": case.leaves or 0,
        "dtype": {torch.float32: "fp32", torch.bfloat16: "bf16"}[case.dtype],
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    names = (case.base, adapter, *(folder / name for name in ("batches.safetensors", "out.safetensors")))
    call(*names, folder / "settings.json")
    return load_file(folder / "out.safetensors")


def call(*arguments: Any) -> None:
    command = [str(program("train_steps", "core/monograph/train")), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def _native_batch(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    found = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
    found["positions"] = batch["position_ids"][0].clone()
    if "cu_seqlens" in batch:
        return found | {"offsets": batch["cu_seqlens"]}
    lengths, width = batch["attention_mask"].sum(1).tolist(), batch["input_ids"].shape[1]
    offsets, keys = [], []
    for row, length in enumerate(lengths):
        offsets += [row * width, row * width + length]
        keys += [length, 0]
    offsets.append(len(lengths) * width)
    return found | {
        "offsets": torch.tensor(offsets, dtype=torch.int32),
        "key_lengths": torch.tensor(keys, dtype=torch.int32),
    }


def assert_same_bits(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in want.items():
        other = got[name]
        different = int((tensor.reshape(-1).view(torch.int32) != other.reshape(-1).view(torch.int32)).sum())
        assert different == 0, f"{name}: {different} of {tensor.numel()} differ"
