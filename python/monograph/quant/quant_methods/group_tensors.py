"""Tensors of integers or E4M3 with scales of rows or groups of them as PackedWeight and back."""

from __future__ import annotations

import torch

from monograph.ops.formats import GROUP_FORMATS, Format, ZeroPoints
from monograph.quant.packed_weight import PackedWeight, canonical

_SUFFIXES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _format(code: str, scale: torch.Tensor) -> Format:
    """By the dtype of the scales: fp16 and bf16 have one size."""
    if scale.dtype not in _SUFFIXES:
        raise ValueError(f"weight_scale is {scale.dtype}, wanted bfloat16, float16 or float32")
    return GROUP_FORMATS[f"{code}-{_SUFFIXES[scale.dtype]}"]


def _group(shape: tuple[int, int], scale: torch.Tensor) -> int:
    """Elements of a row that share a scale; the row where there is one for all."""
    rows, cols = shape
    if scale.numel() == 1 and rows != 1:
        return cols
    found = list(scale.shape)
    groups = 1 if found == [rows] else found[1] if len(found) == 2 and found[0] == rows else 0
    if groups == 0 or cols == 0 or cols % groups:
        wanted = f"[{rows}, groups] with groups that divide rows of {cols}"
        raise ValueError(f"weight_scale has the shape {found}, wanted {wanted}")
    return cols // groups


def _packed(
    fmt: Format,
    shape: tuple[int, int],
    values: torch.Tensor,
    scales: list[torch.Tensor],
    block: int,
    dtype: torch.dtype,
) -> PackedWeight:
    bytes_, packed = canonical(shape, block, _bytes(values), [_bytes(s) for s in scales], fmt)
    return PackedWeight(fmt, shape, block, bytes_, packed, dtype)


def packed_integers(
    words: torch.Tensor,
    scale: torch.Tensor,
    stated: torch.Tensor,
    zero_point: torch.Tensor | None,
    dtype: torch.dtype,
) -> PackedWeight:
    """int4 or int8 in int32 words of a row, told by their number; views of the tensors, no copy."""
    if words.dtype != torch.int32 or words.dim() != 2:
        raise ValueError(f"weight_packed is {words.dtype} {list(words.shape)}, wanted int32 [rows, words]")
    if stated.dtype != torch.int64 or list(stated.shape) != [2]:
        raise ValueError(f"weight_shape is {stated.dtype} {list(stated.shape)}, wanted int64 [2]")
    rows, cols = (int(size) for size in stated)
    if words.shape[0] != rows or cols < 0:
        raise ValueError(f"weight_packed has {words.shape[0]} rows, weight_shape says {[rows, cols]}")
    fits = {4: -(-cols // 8), 8: -(-cols // 4)}
    bits = [width for width, count in fits.items() if count == words.shape[1]]
    if len(bits) != 1:
        found = f"weight_packed has {words.shape[1]} words for rows of {cols}"
        raise ValueError(f"{found}, wanted {fits[4]} (int4) or {fits[8]} (int8), and rows of 5 or more")
    fmt = _format("int4" if bits == [4] else "int8-packed", scale)
    block = _group((rows, cols), scale)
    scales = [scale]
    if zero_point is not None:
        wanted = [-(-rows * fmt.bits // 32), cols // block]
        if zero_point.dtype != torch.int32 or list(zero_point.shape) != wanted:
            found = f"weight_zero_point is {zero_point.dtype} {list(zero_point.shape)}"
            raise ValueError(f"{found}, wanted int32 {wanted}")
        scales.append(zero_point)
    return _packed(fmt, (rows, cols), words, scales, block, dtype)


def int8_weight(
    values: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, dtype: torch.dtype
) -> PackedWeight:
    """int8 elements; views of the tensors, no copy."""
    if values.dim() != 2:
        raise ValueError(f"weight has the shape {list(values.shape)}, wanted two dimensions")
    shape = (values.shape[0], values.shape[1])
    fmt, block = _format("int8", scale), _group(shape, scale)
    scales = [scale]
    if zero_point is not None:
        if zero_point.dtype != torch.int8 or zero_point.shape != scale.shape or zero_point.numel() == 1:
            found = f"weight_zero_point is {zero_point.dtype} {list(zero_point.shape)}"
            raise ValueError(f"{found}, wanted int8 {list(scale.shape)}, one for each row or group")
        scales.append(zero_point)
    return _packed(fmt, shape, values, scales, block, dtype)


def fp8_rows(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> PackedWeight:
    """E4M3 elements with a scale for each row, or one; views of the tensors, no copy."""
    if values.dim() != 2:
        raise ValueError(f"weight has the shape {list(values.shape)}, wanted two dimensions")
    shape = (values.shape[0], values.shape[1])
    fmt, block = _format("fp8-row", scale), _group(shape, scale)
    return _packed(fmt, shape, values, [scale], block, dtype)


def has_row_scales(values: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether E4M3 elements have one scale for each row, or one for all."""
    return values.dim() == 2 and list(scale.shape) in ([values.shape[0], 1], [values.shape[0]], [1], [])


def _as_type(bytes_: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as numbers of `dtype`; a copy where they do not begin at a multiple of its size."""
    aligned = bytes_.is_contiguous() and bytes_.storage_offset() % dtype.itemsize == 0
    return (bytes_ if aligned else bytes_.clone()).view(dtype)


def stored_groups(weight: PackedWeight) -> dict[str, torch.Tensor]:
    """The tensors of compressed-tensors."""
    fmt, (rows, cols) = weight.format, weight.shape
    groups = cols // weight.block_size
    scale = weight.scales[0].reshape(-1).clone().view(getattr(torch, fmt.scale_types[0]))
    found = {"weight_scale": scale if scale.numel() == 1 else scale.reshape(rows, groups)}
    if fmt.zero_points is ZeroPoints.PACKED:
        words = weight.values.reshape(rows, -1)
        found |= {"weight_packed": _as_type(words, torch.int32), "weight_shape": torch.tensor([rows, cols])}
    else:
        number = torch.float8_e4m3fn if fmt.zero_points is ZeroPoints.NONE else torch.int8
        found["weight"] = weight.values.reshape(rows, cols).view(number)
    if len(weight.scales) == 2:
        whole = fmt.zero_points is ZeroPoints.PACKED
        zeros = _as_type(weight.scales[1].reshape(-1), torch.int32 if whole else torch.int8)
        found["weight_zero_point"] = zeros.reshape(-1, groups)
    return found
