"""Who computes attention over documents on a device: a kernel of ours, torch's flash attention, or nobody.

A CUDA device without a kernel of ours takes `torch.nn.attention.varlen`. What that cannot do is refused by
name there: the portable implementation multiplies every query with every key, and would be a silent choice of
hours. Other devices (XPU, MPS) have no such function in torch and run the portable implementation.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Literal

import torch

from monograph.ops.has_kernel import has_kernel

Path = Literal["kernel", "varlen", "portable"]

# What flash attention of torch 2.13 takes.
SIZES = 256
DTYPES = (torch.float16, torch.bfloat16)
CAPABILITY = (8, 0)
# Its backward keeps a float32 copy of the queries, padded by this many rows for every slot of the offsets.
ROWS_PER_SLOT = 128
MOST_SLOTS = 65535  # blocks of a launch in that direction
MOST_PADDING = 16  # times the queries themselves


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


def why_not_varlen(asked: Asked, capability: tuple[int, int] = CAPABILITY) -> str | None:
    """What `torch.nn.attention.varlen` has not for this; None if it can."""
    if (missing := _missing_in_torch()) is not None:
        return missing
    if capability < CAPABILITY:
        return f"the card has compute capability {capability[0]}.{capability[1]}, wanted 8.0 or more"
    if asked.dtype not in DTYPES:
        return f"the dtype is {str(asked.dtype).removeprefix('torch.')}, wanted bfloat16 or float16"
    if asked.softcap:
        return f"softcap is {asked.softcap}, wanted none"
    if asked.sinks:
        return "there are sinks, wanted none"
    if asked.size != asked.value_size:
        return f"heads of queries have {asked.size} numbers, of values {asked.value_size}, wanted one size"
    if asked.size > SIZES or asked.size % 8:
        return f"the size of a head is {asked.size}, wanted a multiple of 8 up to {SIZES}"
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


def attention_path(device: torch.device, asked: Asked) -> Path:
    """Who computes it. ValueError on a CUDA device if nobody does it well."""
    if has_kernel("varlen_attention", device):
        return "kernel"
    if device.type != "cuda":
        return "portable"
    reason = why_not_varlen(asked, _capability(device.index or 0))
    if reason is None:
        return "varlen"
    raise ValueError(
        f"monograph attention on {device}: torch.nn.attention.varlen cannot do it: {reason}; else wanted "
        'attn_implementation="sdpa", "eager" or flash attention of transformers'
    )
