"""Weights in ggml's blocks: random bytes, decoded by the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from gguf.quants import dequantize

from monograph.ops.formats import GGML_FORMATS
from monograph.quant.ggml_weight import ggml_weight
from monograph.quant.packed_weight import PackedWeight

_TWO = ("q4_1", "q5_1", "q4_k", "q5_k")  # with a minimum behind the scale


def random_blocks(name: str, rows: int, cols: int, seed: int, small: bool = True) -> np.ndarray:
    """Bytes [rows, bytes]. `small`: elements of about 0.1, no NaN; else any fp16 pattern as a scale."""
    fmt = GGML_FORMATS[name]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * cols // fmt.block_sizes[0], fmt.block_bytes), dtype=np.uint8)
    if name == "ggml_mxfp4" and small:
        blocks[:, 0] = rng.integers(121, 125, len(blocks))
        return blocks.reshape(rows, -1)
    places = [208] if name == "q6_k" else [0, 2] if name in _TWO else [0]
    for at in places if small else []:
        exponent = 3 if fmt.block_sizes[0] == 256 else 8
        blocks[:, at + 1] = (blocks[:, at + 1] & 0x83) | exponent << 2
    return blocks.reshape(rows, -1)


def ggml_type(name: str) -> gguf.GGMLQuantizationType:
    """Of a format of ours."""
    return gguf.GGMLQuantizationType[name.removeprefix("ggml_").upper()]


def gguf_values(name: str, blocks: np.ndarray) -> torch.Tensor:
    """float32, by the gguf package."""
    with np.errstate(all="ignore"):
        return torch.from_numpy(dequantize(blocks, ggml_type(name)))


def random_weight(
    name: str, rows: int, cols: int, seed: int = 0, row_map: torch.Tensor | None = None
) -> tuple[PackedWeight, torch.Tensor]:
    """A weight and its elements in float32, in the order of the map."""
    blocks = random_blocks(name, rows, cols, seed)
    dense = gguf_values(name, blocks)
    packed = ggml_weight(torch.from_numpy(blocks), name, cols, row_map=row_map)
    return packed, dense if row_map is None else dense[row_map.long()]


def shuffled(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).int()
