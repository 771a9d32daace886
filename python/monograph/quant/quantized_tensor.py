"""Many tensors quantised at once: views of few buffers, each with a row- and a columnwise use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from monograph.ops.formats import format_named
from monograph.ops.split_quantize import places
from monograph.ops.split_quantize import split_quantize as split_quantize_op
from monograph.quant.packed_weight import PackedWeight, canonical


@dataclass(eq=False)
class QuantizedTensor:
    """A matrix that was quantised along its rows, along its columns, both or not at all.

    `rowwise` is what `monograph.quantize` makes of the matrix, `columnwise` what it makes of the transposed
    one: a `PackedWeight` of shape (cols, rows). A usage that was not asked for is None; with neither, shape
    and dtype are all there is.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    format: str
    rowwise: PackedWeight | None = None
    columnwise: PackedWeight | None = None

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The matrix, from its rowwise use if there is one."""
        if self.rowwise is not None:
            return self.rowwise.dequantize(dtype)
        if self.columnwise is not None:
            return self.columnwise.dequantize(dtype).mT
        raise ValueError(f"dequantize: a tensor of shape {self.shape} was made for shapes only, without data")

    @property
    def nbytes(self) -> int:
        return sum(use.nbytes for use in (self.rowwise, self.columnwise) if use is not None)


def split_quantize(
    tensor: torch.Tensor,
    splits: Sequence[int],
    format: str,
    rowwise: bool = True,
    columnwise: bool = False,
    *,
    block_size: int | None = None,
    nonfinite: str = "error",
    rule: str = "default",
) -> tuple[list[QuantizedTensor], list[torch.Tensor]]:
    """Cuts a matrix into `splits` rows and quantises each piece: (tensors, buffers).

    All parts of the tensors are views of the buffers: one for the rowwise use, one for the columnwise. Who
    offloads or frees them moves the buffers. Columnwise, a piece is quantised as its transpose, so its rows
    must be whole blocks in the formats whose blocks lie in a row. With neither use nothing is computed: the
    tensors have shapes only and there is no buffer.

        tensors, buffers = mg.split_quantize(weights, [256] * 32, "mxfp8", columnwise=True)
        mg.linear(x, tensors[3].rowwise)
    """
    if nonfinite not in ("error", "saturate"):
        raise ValueError(f"nonfinite is {nonfinite!r}, wanted 'error' or 'saturate'")
    if tensor.dim() != 2:
        raise ValueError(f"split_quantize: tensor has shape {tuple(tensor.shape)}, wanted two dimensions")
    fmt = format_named(format)
    block = fmt.default_block if block_size is None else block_size
    fmt.check_block(block)
    cols = tensor.shape[1]
    buffers = split_quantize_op(
        tensor,
        splits,
        fmt.number,
        block,
        rowwise,
        columnwise,
        nonfinite == "saturate",
        fmt.rule_number(rule),
    )
    found = [QuantizedTensor((rows, cols), tensor.dtype, format) for rows in splits]
    rest = iter(buffers)
    for name, wanted in (("rowwise", rowwise), ("columnwise", columnwise)):
        if not wanted:
            continue
        buffer = next(rest)
        shapes = [one.shape if name == "rowwise" else one.shape[::-1] for one in found]
        for one, shape, parts in zip(found, shapes, places(fmt, block, shapes)[0], strict=True):
            values, *scales = (buffer[part.begin : part.begin + part.size] for part in parts)
            packed = canonical(shape, block, values, scales, fmt)
            setattr(one, name, PackedWeight(fmt, shape, block, *packed, tensor.dtype))
    return found, buffers
