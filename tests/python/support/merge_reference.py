"""A tiny base, adapters on it, and merged folders held to PEFT's merge in float64."""

from __future__ import annotations

import pathlib
import warnings
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from support.tiny_models import llama_config

NEAR_TIE = 1e-11


def base_model(dtype: torch.dtype, **changes: Any) -> Any:
    torch.manual_seed(3)
    model: Any = LlamaForCausalLM(llama_config(hidden_size=64, intermediate_size=96, **changes))
    return model.to(dtype)


def adapter_on(
    model: Any, folder: str | pathlib.Path, dtype: torch.dtype, seed: int = 5, **settings: Any
) -> Any:
    """A PEFT model whose adapter is random everywhere, as after training, saved to `folder`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "down_proj"]}
        peft_model = get_peft_model(model, LoraConfig(**(plain | settings)), autocast_adapter_dtype=False)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in peft_model.named_parameters():
            if not parameter.requires_grad:
                continue
            noise = torch.randn(parameter.shape, generator=generator) * 0.02
            if "magnitude" in name or "modules_to_save" in name or "tokens_delta" in name:
                noise = parameter.detach().float() * (1 + noise)
            parameter.data = noise.to(dtype)
        peft_model.save_pretrained(str(folder))
    return peft_model


def stored(value64: np.ndarray, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """`value64` rounded to nearest even, as float64, and where it is too close to a middle to decide."""
    if dtype == torch.float32:
        nearest = value64.astype(np.float32)
        candidates = [np.nextafter(nearest, np.float32(s)) for s in (-np.inf, np.inf)] + [nearest]
        even = [(c.view(np.uint32) & 1) == 0 for c in candidates]
    else:
        narrow = torch.from_numpy(value64).to(dtype).view(torch.int16).numpy().view(np.uint16)
        bits = [narrow - 1, narrow + 1, narrow]
        candidates = [torch.from_numpy(b.view(np.int16)).view(dtype).float().numpy() for b in bits]
        even = [(b & 1) == 0 for b in bits]
    values = np.stack([c.astype(np.float64) for c in candidates])
    distance = np.nan_to_num(np.abs(values - value64), nan=np.inf)
    best = distance.min(axis=0)
    # Among equally near ones the even one.
    score = np.where(distance == best, np.where(np.stack(even), 0, 1), 2)
    rounded = np.take_along_axis(values, score.argmin(axis=0)[None], axis=0)[0]
    second = np.sort(distance, axis=0)[1]
    return rounded, (second - best) <= NEAR_TIE * np.abs(value64)


def check_against_float64(folder: pathlib.Path, wanted_model: Any) -> int:
    """Every tensor of the folder is the rounded one of `wanted_model`; returns how many were near ties."""
    ties = 0
    wanted = wanted_model.state_dict()
    found = load_file(folder / "model.safetensors")
    assert set(found) <= set(wanted)
    for name, tensor in found.items():
        rounded, near = stored(wanted[name].numpy(), tensor.dtype)
        different = tensor.double().numpy() != rounded
        assert not (different & ~near).any(), f"{name}: {int((different & ~near).sum())} differ"
        ties += int(different.sum())
    return ties
