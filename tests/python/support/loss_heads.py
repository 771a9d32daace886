"""Heads and targets of the loss operators, and the losses in float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import monograph as mg

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HALF_ULP = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}


def head(
    tokens: int, vocabulary: int, width: int, dtype: torch.dtype, format: str | None = None, seed: int = 0
) -> tuple[Any, ...]:
    """x, the weight's three arguments, its dense values, bias and labels, every third of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, generator=generator).to(dtype)
    weight = (torch.randn(vocabulary, width, generator=generator) * 0.2).to(dtype)
    bias = torch.randn(vocabulary, generator=generator).to(dtype)
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    labels[1::3] = -100
    if format is None:
        return x, (weight, [], [0, 0, vocabulary, width]), weight, bias, labels
    w = mg.quantize(weight, format, double_quant=True)
    return x, (w.values, list(w.scales), w.layout), w.dequantize(dtype), bias, labels


def float64_losses(
    x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor, labels: torch.Tensor, softcap: float, scale: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    z = (x @ dense.t() + bias) * scale
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    return F.cross_entropy(z, labels, reduction="none", ignore_index=-100), z
