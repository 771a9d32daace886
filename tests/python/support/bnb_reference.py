"""bitsandbytes' two paths on a CPU, called by name: its native kernel and its PyTorch reference."""

from __future__ import annotations

from typing import Any

import bitsandbytes  # noqa: F401  (registers the ops)
import torch
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
from bitsandbytes.backends.utils import _get_4bit_code

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def quantize(weight: torch.Tensor, block: int, quant_type: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed, absmax) as bitsandbytes' CPU path gives them."""
    return torch.ops.bitsandbytes.quantize_4bit(weight, block, quant_type, torch.uint8)


def native(
    packed: torch.Tensor, absmax: torch.Tensor, block: int, quant_type: str, shape: Any, dtype: torch.dtype
) -> torch.Tensor:
    return torch.ops.bitsandbytes.dequantize_4bit(packed, absmax, block, quant_type, shape, dtype)


def reference(
    packed: torch.Tensor, absmax: torch.Tensor, block: int, quant_type: str, shape: Any, dtype: torch.dtype
) -> torch.Tensor:
    code = _get_4bit_code(quant_type, torch.device("cpu"))
    eager = getattr(_dequantize_4bit_compute, "_torchdynamo_orig_callable", _dequantize_4bit_compute)
    return eager(packed.reshape(-1), absmax, code, block, shape, dtype)


def nested_scales(absmax: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """(codes, groups, map, offset) and the scales they decode to, through bitsandbytes' own functions."""
    from bitsandbytes.functional import dequantize_blockwise, quantize_blockwise

    offset = absmax.mean()
    codes, state = quantize_blockwise(absmax - offset, blocksize=256)
    decoded = dequantize_blockwise(codes, state) + offset
    return (codes, state.absmax, state.code, offset), decoded


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[tensor.element_size()])
