"""PackedWeight of ggml's blocks: the bytes of a tensor of a GGUF file, as they lie there."""

from __future__ import annotations

import torch

from monograph.ops.argument_checks import check_packed
from monograph.ops.formats import GGML_FORMATS, ggml_format
from monograph.ops.layout import read_layout
from monograph.quant.packed_weight import PackedWeight, canonical


def ggml_weight(
    values: torch.Tensor,
    format: str,
    cols: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    row_map: torch.Tensor | None = None,
) -> PackedWeight:
    """A weight of rows of `cols` elements on the bytes of a GGUF's tensor: views, no copy.

    `format` is ggml's name of the type, in any case: "Q4_K", "q8_0", "MXFP4". `row_map` is int32, the stored
    row of each row of the weight: `rotary_row_map` for the query and key projections of architecture "llama".

        tensor = gguf.GGUFReader(path).tensors[0]
        weight = ggml_weight(torch.from_numpy(tensor.data), tensor.tensor_type.name, int(tensor.shape[0]))
        layer = monograph.nn.QuantLinear(weight)
    """
    fmt = ggml_format(format)
    if fmt is None:
        raise ValueError(f"ggml_weight: format is {format!r}, known are {', '.join(GGML_FORMATS)}")
    block = fmt.block_sizes[0]
    if cols <= 0 or cols % block:
        raise ValueError(
            f"ggml_weight: rows have {cols} elements, format {fmt.name} wants a multiple of {block}"
        )
    if values.dtype != torch.uint8:
        raise ValueError(f"ggml_weight: values has dtype {values.dtype}, wanted torch.uint8")
    if values.numel() % fmt.row_bytes(cols):
        wanted = f"wanted rows of {fmt.row_bytes(cols)}"
        raise ValueError(f"ggml_weight: values has {values.numel()} bytes, {wanted}")
    scales = [] if row_map is None else [_checked_map(row_map, values.numel() // fmt.row_bytes(cols))]
    rows = values.numel() // fmt.row_bytes(cols) if row_map is None else row_map.numel()
    values, packed = canonical((rows, cols), block, values, scales, fmt)
    weight = PackedWeight(fmt, (rows, cols), block, values, packed, dtype)
    check_packed("ggml_weight", values, packed, read_layout("ggml_weight", weight.layout))
    return weight


def _checked_map(row_map: torch.Tensor, stored: int) -> torch.Tensor:
    """The map as bytes."""
    if row_map.dtype != torch.int32 or row_map.dim() != 1:
        found = f"dtype {row_map.dtype} and {row_map.dim()} dimensions"
        raise ValueError(f"ggml_weight: row_map has {found}, wanted torch.int32 and 1")
    outside = (row_map < 0) | (row_map >= stored)
    if row_map.device.type != "meta" and bool(outside.any()):
        wrong = int(row_map[outside][0])
        raise ValueError(f"ggml_weight: row_map has the row {wrong}, values has {stored} rows")
    return row_map.contiguous().view(torch.uint8)


def rotary_row_map(rows: int, heads: int) -> torch.Tensor:
    """The row map of a query or key projection of architecture "llama" with `heads` heads.

    llama.cpp rotates neighbouring rows of a head, transformers its two halves: row t * half + i of a head is
    stored as row 2 i + t (core/monograph/gguf/row_order.h).
    """
    if heads <= 0 or rows % (2 * heads):
        wanted = "wanted heads with an even number of rows each"
        raise ValueError(f"rotary_row_map: {rows} rows of {heads} heads, {wanted}")
    stored = torch.arange(rows, dtype=torch.int32).reshape(heads, rows // heads // 2, 2)
    return stored.transpose(1, 2).reshape(-1)
