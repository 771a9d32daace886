"""Who computes attention over documents on a device, as the table of providers has it.

A CUDA device without a kernel of ours takes `torch.nn.attention.varlen`, and flash-attn, if it is installed,
for what that cannot do. What neither can do is refused by name there: the portable implementation multiplies
every query with every key, and would be a silent choice of hours. Other devices (XPU, MPS) have no such
function in torch and run the portable implementation.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from monograph.ops import providers

# What flash attention of torch 2.13 takes.
SIZES = 256
DTYPES = (torch.float16, torch.bfloat16)
CAPABILITY = (8, 0)
# Its backward keeps a float32 copy of the queries, padded by this many rows for every slot of the offsets.
ROWS_PER_SLOT = 128
MOST_SLOTS = 65535  # blocks of a launch in that direction
MOST_PADDING = 16  # times the queries themselves
OTHERWISE = 'else wanted attn_implementation="sdpa", "eager" or flash attention of transformers'


@dataclass(frozen=True)
class Asked:
    """What a call, or a model, wants of attention. slots: documents that the offsets have room for."""

    dtype: torch.dtype
    size: int
    value_size: int
    softcap: float = 0.0
    sinks: bool = False
    scale: float = 1.0
    tokens: int | None = None
    slots: int | None = None


def asked_of(operator: str, *arguments: Any) -> Asked:
    """What a call of the operator, or of its gradient, asks."""
    if operator.endswith("_backward"):
        _, q, _, v, _, _, *rest = arguments
    else:
        q, _, v, *rest = arguments
    cu_q, _, _, sinks, _, _, scale, softcap = rest
    slots = cu_q.numel() - 1
    return Asked(q.dtype, q.shape[-1], v.shape[-1], softcap, sinks is not None, scale, q.shape[0], slots)


@functools.cache
def _missing_in_torch() -> str | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen, wanted 2.13"
    known = inspect.signature(varlen_attn).parameters
    missing = [name for name in ("scale", "window_size", "enable_gqa") if name not in known]
    return f"varlen_attn of torch {torch.__version__} has no {missing[0]}, wanted 2.13" if missing else None


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    """(9, 9) for AMD's cards, whose numbers are others."""
    return (9, 9) if torch.version.hip else torch.cuda.get_device_capability(index)


def capability_of(device: torch.device) -> tuple[int, int]:
    """Of a card; what flash attention wants for anything else."""
    return _capability(device.index or 0) if device.type == "cuda" else CAPABILITY


def _why_not_flash(asked: Asked, capability: tuple[int, int]) -> str | None:
    """What flash attention has not for this, whoever brings it; None if it can."""
    if capability < CAPABILITY:
        return f"the card has compute capability {capability[0]}.{capability[1]}, wanted 8.0 or more"
    if asked.dtype not in DTYPES:
        return f"the dtype is {str(asked.dtype).removeprefix('torch.')}, wanted bfloat16 or float16"
    if asked.sinks:
        return "there are sinks, wanted none"
    if asked.size != asked.value_size:
        return f"heads of queries have {asked.size} numbers, of values {asked.value_size}, wanted one size"
    if asked.scale < 0:
        return f"scale is {asked.scale}, wanted 0 or more"
    if asked.slots is not None and asked.tokens is not None:
        most = min(MOST_SLOTS, max(1, MOST_PADDING * asked.tokens // ROWS_PER_SLOT))
        if asked.slots > max(most, 64):
            return (
                f"the offsets have room for {asked.slots} documents in {asked.tokens} tokens, and its "
                f"backward pads each to {ROWS_PER_SLOT} rows; wanted {max(most, 64)} or fewer, as "
                "PackedCollator(max_documents=) gives"
            )
    return None


def why_not_varlen(asked: Asked, capability: tuple[int, int] = CAPABILITY) -> str | None:
    """What `torch.nn.attention.varlen` has not for this; None if it can."""
    if (missing := _missing_in_torch()) is not None:
        return missing
    if asked.softcap:
        return f"softcap is {asked.softcap}, wanted none"
    if asked.size > SIZES or asked.size % 8:
        return f"the size of a head is {asked.size}, wanted a multiple of 8 up to {SIZES}"
    return _why_not_flash(asked, capability)


def why_not_flash_attn(asked: Asked, capability: tuple[int, int] = CAPABILITY) -> str | None:
    """What `flash_attn_varlen_func` has not; it has soft-caps, and pads heads to a multiple of 8."""
    if asked.size > SIZES:
        return f"the size of a head is {asked.size}, wanted up to {SIZES}"
    return _why_not_flash(asked, capability)


_WHY_NOT: dict[str, tuple[str, Callable[[Asked, tuple[int, int]], str | None]]] = {
    "torch": ("torch.nn.attention.varlen", why_not_varlen),
    "flash-attn": ("flash-attn", why_not_flash_attn),
}


def facts(device_type: str, index: int) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...], int, int]:
    """The providers that are there, why others are not, and the card's capability: a graph asks once."""
    names = providers.candidates("varlen_attention", device_type)
    others = providers.missing_in_row("varlen_attention", device_type)
    flash = any(name in _WHY_NOT for name in names)
    capability = capability_of(torch.device(device_type, index)) if flash else CAPABILITY
    return names, tuple((name, others[name]) for name in others if name in _WHY_NOT), *capability


def attention_provider(device: torch.device, asked: Asked) -> str:
    """Who computes it: "monograph", "torch", "flash-attn" or "portable". ValueError if nobody can."""
    names, missing, major, minor = facts(device.type, device.index or 0)
    reasons = []
    for name in names:
        if name not in _WHY_NOT:
            return name
        about, why_not = _WHY_NOT[name]
        if (reason := why_not(asked, (major, minor))) is None:
            return name
        reasons.append(f"{about} cannot do it: {reason}")
    reasons += [reason for _, reason in missing]
    raise ValueError(f"monograph attention on {device}: {'; '.join(reasons)}; {OTHERWISE}")
