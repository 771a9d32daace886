"""Tensors of small floating-point elements as PackedWeight and back, whatever their producer names them."""

from __future__ import annotations

import torch

from monograph.ops.formats import format_named
from monograph.quant.packed_weight import PackedWeight, canonical

_SCALE_KINDS = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e8m0fnu: "e8m0",
    torch.uint8: "e8m0",
}
_SCALE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
DENSE = (torch.bfloat16, torch.float16, torch.float32)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _shape(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)


def element_weight(
    format: str,
    values: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    tensor_scale: torch.Tensor | None = None,
) -> PackedWeight:
    """A weight from its codes [rows, bytes of a row], one scale per block and, in NVFP4, one for all. A stack
    of experts has a dimension in front, and then NVFP4 a scale for each.

    Views of the tensors; nothing is copied.
    """
    fmt = format_named(format)
    if values.dim() not in (2, 3):
        raise ValueError(f"values have the shape {_shape(values)}, wanted two dimensions or three")
    shape = (*values.shape[:-1], values.shape[-1] * 8 // fmt.bits)
    kind = _SCALE_KINDS.get(scale.dtype, str(scale.dtype))
    if kind not in fmt.scale_types:
        raise ValueError(f"scales are {scale.dtype}, format {format} wants {' or '.join(fmt.scale_types)}")
    grid = fmt.grid(shape, fmt.default_block)
    if _shape(scale) != grid:
        raise ValueError(
            f"scales have the shape {_shape(scale)}, {format} of shape {list(shape)} wants {grid}"
        )
    scales = [_bytes(scale)]
    if fmt.tensor_scale:
        count = values.shape[0] if values.dim() == 3 else 1
        if tensor_scale is None or tensor_scale.numel() != count or tensor_scale.dtype != torch.float32:
            found = "missing" if tensor_scale is None else f"{_shape(tensor_scale)} {tensor_scale.dtype}"
            wanted = "one float32 number" if count == 1 else f"{count} float32 numbers"
            raise ValueError(f"the tensor scale is {found}, wanted {wanted}")
        scales.append(_bytes(tensor_scale))
    bytes_, packed = canonical(shape, fmt.default_block, _bytes(values), scales, fmt)
    return PackedWeight(fmt, shape, fmt.default_block, bytes_, packed, dtype)


def e4m3_weight(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> PackedWeight:
    """MXFP8 or FP8 blocks: the number of scales says which. One row of at most 32 is both, and the same."""
    rows_of_blocks = [*values.shape[:-1], values.shape[-1] // 32]
    exponents = _SCALE_KINDS.get(scale.dtype) == "e8m0"
    format = "mxfp8" if exponents and _shape(scale) == rows_of_blocks else "fp8-block"
    return element_weight(format, values, scale, dtype)


def stored_values(weight: PackedWeight) -> torch.Tensor:
    """The codes as producers store them: E4M3 numbers, or bytes of two E2M1 numbers."""
    return weight.values.view(torch.float8_e4m3fn) if weight.format.bits == 8 else weight.values


def stored_scales(weight: PackedWeight, exponents: torch.dtype = torch.uint8) -> torch.Tensor:
    """The block scales with one number per block; E8M0 as `exponents`. 2- and 4-byte numbers are copied: a
    view of mapped bytes as such needs alignment."""
    grid = weight.format.grid(weight.shape, weight.block_size)
    stored = weight.scales[0].reshape(-1)
    kind = weight.format.scale_type(stored.numel(), torch.Size(grid).numel())
    dtype = _SCALE_DTYPES.get(kind, exponents)
    return (stored.clone() if dtype.itemsize > 1 else stored).view(dtype).reshape(grid)
