"""compressed-tensors' own scales, zero points, codes and packed tensors of a weight in groups of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

CODES = [("int4", True), ("int4", False), ("int8", True), ("int8", False), ("fp8", True)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# The options of the tool, and (code, block, symmetric). Rows have 128 and 192 elements.
CASES = {
    "int4": (["--to", "int4", "--block-size", "64"], ("int4", 64, True)),
    "int4-row": (["--to", "int4", "--block-size", "0"], ("int4", 0, True)),
    "int4-asymmetric": (["--to", "int4", "--block-size", "32", "--asymmetric"], ("int4", 32, False)),
    "int8": (["--to", "int8"], ("int8", 0, True)),
    "int8-asymmetric": (["--to", "int8", "--block-size", "64", "--asymmetric"], ("int8", 64, False)),
    "fp8": (["--to", "fp8"], ("fp8", 0, True)),
}


def arguments(code: str, block: int, symmetric: bool) -> Any:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    return quantization.QuantizationArgs(
        num_bits=4 if code == "int4" else 8,
        type="float" if code == "fp8" else "int",
        symmetric=symmetric,
        strategy="group" if block else "channel",
        group_size=block or None,
    )


@dataclass(frozen=True)
class Compressed:
    """The tensors that the library stores for one layer, and the means to undo them."""

    tensors: dict[str, torch.Tensor]
    scheme: Any
    compressor: Any

    def decompressed(self) -> torch.Tensor:
        return self.compressor.decompress(self.tensors, self.scheme)["weight"]


def scales_and_zeros(weight: torch.Tensor, args: Any, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """By the minimum and maximum of each group, as its min-max observer takes them."""
    from compressed_tensors.quantization.utils import calculate_qparams

    groups = weight.reshape(weight.shape[0], -1, block or weight.shape[1])
    return calculate_qparams(groups.amin(-1), groups.amax(-1), args)


def compressed(weight: torch.Tensor, code: str, block: int, symmetric: bool) -> Compressed:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    args = arguments(code, block, symmetric)
    scale, zero = scales_and_zeros(weight, args, block)
    name = "float-quantized" if code == "fp8" else "pack-quantized"
    compressor = BaseCompressor.get_value_from_registry(name)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    return Compressed(compressor.compress(state, scheme), scheme, compressor)


def producer_parts(weight: torch.Tensor, code: str, block: int, symmetric: bool) -> list[torch.Tensor]:
    """[values, scales] or with zero points, as the bytes of what the library stores."""
    found = compressed(weight, code, block, symmetric).tensors
    names = ["weight" if code == "fp8" else "weight_packed", "weight_scale"]
    names += [] if symmetric else ["weight_zero_point"]
    return [found[name].contiguous().reshape(-1).view(torch.uint8) for name in names]
