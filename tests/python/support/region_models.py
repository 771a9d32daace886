"""Tiny models whose decoder layers become regions, and the comparison of two of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import monograph as mg
from monograph.nn import QuantLinear
from support.tiny_models import tiny_llama

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
}
LORA = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])


def build(
    layers: int = 1,
    config: LoraConfig = LORA,
    formats: tuple[str, ...] = ("nf4",),
    checkpointing: bool = False,
) -> Any:
    model = tiny_llama(dtype=torch.bfloat16, num_hidden_layers=layers, **SMALL)
    linears = [(name, m) for name, m in model.named_modules() if type(m) is nn.Linear and "head" not in name]
    for place, (name, linear) in enumerate(linears):
        model.set_submodule(name, QuantLinear.from_linear(linear, formats[place % len(formats)]))
    if checkpointing:
        model.gradient_checkpointing_enable()
    model = mg.add_lora(model, config)
    trained_b(model)
    return model.train()


def trained_b(model: Any) -> None:
    """B that is not zero, so that A has gradients."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)


def ids(length: int = 12, rows: int = 2, seed: int = 2) -> torch.Tensor:
    return torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


def loss_and_gradients(
    model: Any, tokens: torch.Tensor | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    tokens = ids() if tokens is None else tokens
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not loss.requires_grad:
        return loss, {}
    gradients = torch.autograd.grad(loss, tuple(named.values()), materialize_grads=True)
    return loss, dict(zip(named, gradients, strict=True))


def assert_same(model: Any, plain: Any, tokens: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    (loss, gradients), (want, wanted) = loss_and_gradients(model, tokens), loss_and_gradients(plain, tokens)
    assert loss.item() == want.item()
    assert gradients.keys() >= wanted.keys()
    for name, gradient in gradients.items():
        # A region takes all that is trained: what it does not read has gradients of zero, not none.
        assert torch.equal(gradient, wanted.get(name, torch.zeros_like(gradient))), name
    return gradients


def compiled(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(tokens: torch.Tensor) -> torch.Tensor:
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    return torch.compile(run, backend="aot_eager", fullgraph=True)


def batch() -> dict[str, torch.Tensor]:
    return {"input_ids": ids(), "labels": ids()}


def steps_equal(step: Any, eager: Any, rows: Any = None) -> None:
    for row in rows or [batch(), batch()]:
        got, want = step([row], 1e-2), eager([row], 1e-2)
        assert got.loss.item() == want.loss.item()
        assert torch.equal(step.state.flat, eager.state.flat)
        assert torch.equal(step.state.exp_avg, eager.state.exp_avg)


class InPlace(LlamaDecoderLayer):
    """Writes into a tensor that others can see."""

    def forward(self, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        self.input_layernorm.weight.data.mul_(1)
        return super().forward(hidden_states, *arguments, **options)
