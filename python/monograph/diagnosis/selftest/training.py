"""A training step of a small model on the device: one graph, and twenty losses beside the CPU's."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from monograph.diagnosis.selftest.case import Case, Figures, Skipped, require
from monograph.diagnosis.selftest.device import Device

STEPS, RATE = 20, 5e-3
LARGEST_DIFFERENCE = 1e-2  # of a loss, relative: float32 in another order of sums, through 20 updates
VOCABULARY, TOKENS = 96, 48


def small_model(where: torch.device) -> Any:
    """Two layers of Llama in float32 on nf4, with LoRA; the same values on every device."""
    for name in ("transformers", "peft"):
        if importlib.util.find_spec(name) is None:
            raise Skipped(f"{name} is not installed")
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    from monograph.hf.optimize import optimize
    from monograph.nn.replace_linears import replace_linears

    before = torch.random.get_rng_state()
    torch.manual_seed(0)
    heads: dict[str, Any] = dict(num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False)
    sizes: dict[str, Any] = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, **heads)
    config = LlamaConfig(vocab_size=VOCABULARY, initializer_range=0.1, **sizes)
    base = LlamaForCausalLM(config)
    replace_linears(base, "nf4", skip=("lm_head",), double_quant=True)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    torch.random.set_rng_state(before)
    model.to(where)
    optimize(model)
    return model


def batch(number: int, where: torch.device) -> dict[str, torch.Tensor]:
    """Two rows that count up by a step of their own."""
    start = torch.tensor([[number * 7], [number * 11 + 3]])
    step = torch.tensor([[1 + number % 2], [3]])
    ids = (start + step * torch.arange(TOKENS)) % VOCABULARY
    return {"input_ids": ids.to(where), "labels": ids.to(where)}


def one_graph(device: Device) -> Figures:
    from monograph.diagnosis import doctor

    model = small_model(device.where)
    report = doctor(model, [batch(0, device.where), batch(1, device.where)], quiet=True)
    figures = {
        "graphs": report.graphs,
        "breaks": len(report.breaks),
        "recompiles": len(report.recompiles),
        "weight_copies": len(report.weight_copies),
    }
    require(report.holds, f"the step is not one graph without copies: {figures}", figures)
    return figures


def losses(where: torch.device, mode: str) -> list[float]:
    from monograph.training import TrainStep

    step = TrainStep(small_model(where), mode=mode)
    found = [step([batch(number % 2, where)], RATE).loss for number in range(STEPS)]
    return [float(loss) for loss in found]


def loss_curve(device: Device) -> Figures:
    host, there = losses(torch.device("cpu"), "eager"), losses(device.where, "graph")
    worst = max(abs(a - b) / max(abs(a), 1e-6) for a, b in zip(host, there, strict=True))
    figures: Figures = {"cpu": host, "device": there, "largest_difference": worst}
    require(
        worst == worst and worst <= LARGEST_DIFFERENCE, f"a loss is off by {worst:.4f} of the CPU's", figures
    )
    require(there[-1] < 0.8 * there[0], f"the loss went from {there[0]:.3f} to {there[-1]:.3f}", figures)
    return figures


CASES = (
    Case("a training step is one graph", one_graph),
    Case(f"{STEPS} losses beside the CPU's", loss_curve),
)
