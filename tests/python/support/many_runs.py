"""Seven adapters that differ in all that adapters can, their data, and one hash of what each becomes."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from peft import LoraConfig

import monograph as mg
from monograph.many.adapter_run import AdapterRun
from monograph.nn import replace_linears
from monograph.packing import PackedCollator
from monograph.training import TrainStep
from support.step_models import FAMILIES, SMALL

MICRO_BATCHES = {"norm": 1, "bias": 2, "wide": 3, "odd": 1, "many": 5, "dora": 2, "last": 1}


def lora(r: int, dropout: float = 0.0, **options: Any) -> LoraConfig:
    given: dict[str, Any] = {"lora_alpha": 16, "lora_dropout": dropout, "target_modules": "all-linear"}
    return LoraConfig(r=r, **(given | options))


def seven() -> dict[str, AdapterRun]:
    """Two are called as what is not decayed; one alone is."""
    return {
        "norm": AdapterRun(lora(8), 2e-3, seed=1),
        "bias": AdapterRun(lora(1, 0.1), 5e-3, seed=2, max_grad_norm=0.05, weight_decay=0.1),
        "wide": AdapterRun(lora(33), 1e-3, seed=3, weight_decay=0.1),
        "odd": AdapterRun(lora(12, 0.3, use_rslora=True), 3e-3, seed=4, max_grad_norm=0.0),
        "many": AdapterRun(lora(8), 1e-2, seed=1, betas=(0.8, 0.95), eps=1e-6),
        "dora": AdapterRun(lora(16, use_dora=True), 2e-3, seed=6),
        "last": AdapterRun(lora(8, 0.1, target_modules=["q_proj", "v_proj", "down_proj"]), 2e-3, seed=7),
    }


def base(family: str = "llama", dtype: torch.dtype = torch.bfloat16, checkpointing: bool = False) -> Any:
    from monograph.hf.transformers.activation_checkpointing import enable_checkpointing

    config_class, model_class, options = FAMILIES[family]
    torch.manual_seed(0)
    model = model_class(config_class(**(SMALL | options))).to(dtype)
    replace_linears(model, "nf4", double_quant=True)
    if checkpointing:
        enable_checkpointing(model, {"use_reentrant": False})
    return model


def batches(name: str, step: int, most: int = 30) -> list[dict[str, Any]]:
    """The micro-batches of one step of an adapter: documents of any lengths, of one with padding."""
    draw = torch.Generator().manual_seed(sum(map(ord, name)) * 1000 + step)
    collate = PackedCollator(pad_to_multiple_of=8 if name == "wide" else 1)
    made = []
    for _ in range(MICRO_BATCHES.get(name, 1)):
        count = int(torch.randint(1, 4, (1,), generator=draw))
        lengths = torch.randint(3, most, (count,), generator=draw).tolist()
        rows = [torch.randint(0, 256, (length,), generator=draw).tolist() for length in lengths]
        made.append(collate([{"input_ids": ids} for ids in rows]))
    return made


def digest(step: TrainStep) -> str:
    """Of masters, both moments and the clock."""
    state = step.state
    parts = (state.flat, state.exp_avg, state.exp_avg_sq, state.steps)
    return hashlib.sha256(b"".join(part.detach().numpy().tobytes() for part in parts)).hexdigest()


def result_of(result: Any) -> tuple[str, str]:
    return float(result.loss).hex(), float(result.grad_norm).hex()


def alone(name: str, run: AdapterRun, steps: int, mode: str, model: Any) -> tuple[str, list[tuple[str, str]]]:
    """What the adapter becomes by TrainStep on a base of its own; losses and norms of its steps."""
    torch.manual_seed(run.seed)
    step = TrainStep(
        mg.add_lora(model, run.config),
        mode=mode,
        betas=run.betas,
        eps=run.eps,
        weight_decay=run.weight_decay,
        max_grad_norm=run.max_grad_norm,
        seed=run.seed,
        **run.options,
    )
    results = [step(batches(name, number), learning_rate=run.learning_rate) for number in range(steps)]
    return digest(step), [result_of(result) for result in results]
