"""A tiny model of a class, and which attention mg.optimize leaves it with."""

from __future__ import annotations

import warnings
from typing import Any

import torch

import monograph as mg
from support.tiny_models import tiny_llama


def build(device: str = "cpu", **options: Any) -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    with torch.device(device):
        return tiny_llama(seed=None, **sizes, **options)


def after_optimize(model: Any, **options: Any) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no LoRA layer here
        mg.optimize(model, **options)
    return model.config._attn_implementation
