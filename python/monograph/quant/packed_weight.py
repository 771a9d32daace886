"""PackedWeight: plain uint8 tensors, a format and a shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from monograph.ops.dequantize import dequantize as dequantize_op
from monograph.ops.dequantize_groups import zero_points
from monograph.ops.formats import NF4, BlockShape, Format, ZeroPoints, format_named
from monograph.ops.layout import make_layout, read_layout
from monograph.ops.linear import linear as linear_op
from monograph.ops.linear_shared import linear_shared as linear_shared_op
from monograph.ops.quantize import quantize as quantize_op
from monograph.ops.quantize_groups import stored_zero_points
from monograph.ops.slice_experts import slice_experts
from monograph.ops.slice_rows import slice_rows
from monograph.ops.whole_tensors import require_whole
from monograph.quant.sorted_columns import inverse_of, permuted


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A quantised weight as ordinary tensors, all of them uint8.

    `values` holds the packed elements, [rows, cols * bits / 8] where rows fill whole bytes, else flat.
    `scales` holds numbers as their bytes: (absmax,) or, double-quantised, (absmax codes, groups, map,
    offset); in the other formats (block scales,) or (block scales, tensor scale); beside the blocks of ggml,
    which hold their scales, none or (row map,).
    Nothing here is hidden state: any path that carries uint8 tensors (state_dict, safetensors, sharding,
    offload) carries a weight.
    """

    format: Format
    shape: tuple[int, ...]
    block_size: int
    values: torch.Tensor
    scales: tuple[torch.Tensor, ...]
    dtype: torch.dtype  # of the weight that was quantised; what dequantize() gives unless told otherwise
    transposed: bool = False
    origin: int = 0  # elements before the weight that values and scales begin with: see ops/layout.py
    grid_rows: int = 0  # rows of the matrices that were quantised one by one; 0 for one grid
    # int32 [cols] of a matrix whose columns are stored in another order: quant/sorted_columns.py. dequantize
    # and linear restore it; who reads the bytes takes `stored`.
    columns: torch.Tensor | None = None

    @property
    def double_quant(self) -> bool:
        return len(self.scales) == 4

    @property
    def layout(self) -> list[int]:
        """What the operators take besides the tensors: [format number, block size, *shape], or the longer
        form of `monograph.ops.layout` where the weight was cut."""
        if self.columns is not None:
            raise ValueError(
                f"layout: the weight is {self!r}, which operators would multiply in the order of the file; "
                "wanted weight.stored with x[..., weight.columns], or monograph.linear"
            )
        return make_layout(self.format.number, self.block_size, self.shape, self.origin, self.grid_rows)

    @property
    def stored(self) -> PackedWeight:
        """The same bytes as a weight whose columns have the order of the file."""
        return self if self.columns is None else replace(self, columns=None)

    @property
    def nbytes(self) -> int:
        own = 0 if self.columns is None else self.columns.nbytes
        return own + sum(t.numel() for t in (self.values, *self.scales))

    @property
    def device(self) -> torch.device:
        return self.values.device

    def dequantize(self, dtype: torch.dtype | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """The weight as `dtype` (default: that of the source), or into an existing `out`."""
        if self.transposed:
            if out is not None:
                raise ValueError("dequantize: out= is not supported for a transposed weight")
            return replace(self, transposed=False).dequantize(dtype).t()
        require_whole("dequantize", self.values)
        if self.columns is not None:
            dense = self.stored.dequantize(dtype).index_select(-1, inverse_of(self.columns))
            return dense if out is None else out.copy_(dense)
        return dequantize_op(self.values, list(self.scales), self.layout, dtype or self.dtype, out)

    def t(self) -> PackedWeight:
        """The transposed weight: the same bytes, a flag."""
        if len(self.shape) != 2:
            raise ValueError(f"t: the weight has shape {self.shape}, wanted two dimensions")
        return replace(self, transposed=not self.transposed)

    def slice_rows(self, first: int, count: int) -> PackedWeight:
        """Rows [first, first + count) as a weight of two dimensions: views of the same bytes, no copy.

        Rows of several matrices are counted through. Those of more than one are refused where each matrix has
        square blocks, a tensor scale or a grid of its own.
        """
        if self.transposed:
            raise ValueError("slice_rows: the weight is transposed, wanted one that is not")
        layout = read_layout("slice_rows", self.stored.layout)
        values, scales, part = slice_rows(self.values, self.scales, layout, first, count)
        return replace(
            self, shape=part.shape, values=values, scales=tuple(scales), origin=part.origin, grid_rows=0
        )

    def slice_experts(self, first: int, count: int) -> PackedWeight:
        """Experts [first, first + count) of a stack [E, rows, cols] as a stack: views of the same bytes."""
        if self.transposed or self.columns is not None:
            raise ValueError("slice_experts: the weight is transposed or sorted, wanted one that is not")
        layout = read_layout("slice_experts", self.layout)
        values, scales, part = slice_experts(self.values, self.scales, layout, first, count)
        return replace(self, shape=part.shape, values=values, scales=tuple(scales), origin=part.origin)

    def to(self, device: torch.device | str) -> PackedWeight:
        columns = None if self.columns is None else self.columns.to(device)
        scales = tuple(s.to(device) for s in self.scales)
        return replace(self, values=self.values.to(device), scales=scales, columns=columns)

    def __repr__(self) -> str:
        bits = 8 * self.nbytes / max(prod(self.shape), 1)
        double = ", double_quant" if self.double_quant else ""
        double += ", transposed" if self.transposed else ""
        double += "" if self.columns is None else ", columns sorted by group"
        return (
            f"PackedWeight({self.format.name}, shape={self.shape}, block_size={self.block_size}{double}, "
            f"{bits:.2f} bits per weight)"
        )


def canonical(
    shape: tuple[int, ...],
    block: int,
    values: torch.Tensor,
    scales: list[torch.Tensor],
    fmt: Format = NF4,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Views of flat tensors: values with one row per weight row, scales with one row per row of blocks."""
    if prod(shape) == 0:
        return values, tuple(scales)
    *rows, cols = shape
    if fmt.shape is BlockShape.INTERLEAVED:
        return values.reshape(-1, fmt.row_bytes(cols)), tuple(scales)
    if fmt.shape is BlockShape.GROUP:
        values = values.reshape([*rows, fmt.row_bytes(cols)])
    elif cols * fmt.bits % 8 == 0:
        values = values.reshape([*rows, cols * fmt.bits // 8])
    one = fmt.shape is BlockShape.GROUP and scales[0].numel() == fmt.scale_bytes(None)
    if not one and (cols % block == 0 or fmt.shape is BlockShape.SQUARE):
        *grid, _ = fmt.grid(shape, block)
        scales = [scales[0].reshape([*grid, -1]), *scales[1:]]
    return values, tuple(scales)


def quantize(
    weight: torch.Tensor,
    format: str = "nf4",
    *,
    block_size: int | None = None,
    double_quant: bool = False,
    nonfinite: str = "error",
    rule: str = "default",
    scale_type: str | None = None,
) -> PackedWeight:
    """Quantises a bf16, fp16 or fp32 weight.

    `block_size` is 64 for nf4 and fp4 unless given, 128 for int4 and the row for int8 and fp8, which 0 stands
    for; the other formats have one each. `rule` says how scales are chosen, by name ("floor", "rceil" ...) or
    by whose rule it is ("torchao", "modelopt" ...); docs/reference/formats.md has them. "minmax" gives int4
    and int8 zero points. `scale_type` chooses "float32", "bfloat16" or "e8m0" for fp8-block.

    A NaN or an infinity is an error that names its position. With nonfinite="saturate" such values stay out
    of the block's scale; NaN becomes 0 and an infinity the largest magnitude of its block, in int4,
    int8 and fp8 the code at that end.

        w = monograph.quantize(torch.randn(4096, 4096), "nf4", double_quant=True)
        w = monograph.quantize(torch.randn(4096, 4096), "mxfp4", rule="torchao")
        w.dequantize(torch.bfloat16)
    """
    if nonfinite not in ("error", "saturate"):
        raise ValueError(f"nonfinite is {nonfinite!r}, wanted 'error' or 'saturate'")
    fmt = format_named(format, weight.dtype)
    block = fmt.default_block if block_size is None else block_size
    if block == 0 and fmt.shape is BlockShape.GROUP:
        fmt.check_block(block or 1)
        if weight.dim() == 0:
            raise ValueError(f"quantize: weight has no dimension, format {format} wants rows")
        block = max(weight.shape[-1], 1)
    fmt.check_block(block)
    saturate, number, size = nonfinite == "saturate", fmt.rule_number(rule), fmt.scale_bytes(scale_type)
    numbers = (fmt.number, block, double_quant, saturate, number, size)
    shape = tuple(weight.shape)
    if fmt.shape is BlockShape.GROUP and prod(shape[:-2]) != 1 and prod(shape) > 0:
        return _quantize_stack(fmt, weight, numbers)
    values, *scales = quantize_op(weight, *numbers)
    values, packed_scales = canonical(shape, block, values, scales, fmt)
    return PackedWeight(fmt, shape, block, values, packed_scales, weight.dtype)


def _quantize_stack(fmt: Format, weight: torch.Tensor, numbers: tuple[Any, ...]) -> PackedWeight:
    """A grid for each matrix. Words of zero points alone hold several rows, and begin anew with each."""
    *lead, rows, cols = weight.shape
    values, *scales = quantize_op(weight.reshape(-1, cols), *numbers)
    if len(scales) == 2 and fmt.zero_points is ZeroPoints.PACKED:
        groups = cols // numbers[1]
        zeros = zero_points(fmt, scales[1], prod(lead) * rows, groups).reshape(-1, rows, groups)
        scales[1] = torch.cat([stored_zero_points(fmt, own) for own in zeros])
    shape, block = tuple(weight.shape), numbers[1]
    values, packed = canonical(shape, block, values, scales, fmt)
    return PackedWeight(fmt, shape, block, values, packed, weight.dtype, grid_rows=rows)


def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + bias straight from the packed bytes. Differentiable in x and bias; the base is frozen."""
    if weight.transposed or len(weight.shape) != 2:
        raise ValueError(f"linear: the weight is {weight!r}, wanted two dimensions, not transposed")
    x, stored = permuted(x, weight.columns), weight.stored
    return linear_op(x, stored.values, list(stored.scales), stored.layout, bias)


def linear_shared(
    x: torch.Tensor, weights: Sequence[PackedWeight], biases: Sequence[torch.Tensor] = ()
) -> list[torch.Tensor]:
    """`linear` of several weights on one x (q, k, v; gate, up): x is read once, its gradient is one pass.
    Weights whose columns have different orders are computed one by one."""
    if not all(_same_columns(weight.columns, weights[0].columns) for weight in weights):
        own = list(biases) if biases else [None] * len(weights)
        return [linear(x, weight, bias) for weight, bias in zip(weights, own, strict=True)]
    stored = [weight.stored for weight in weights]
    return linear_shared_op(
        permuted(x, weights[0].columns),
        [weight.values for weight in stored],
        [weight.scales for weight in stored],
        [weight.layout for weight in stored],
        biases,
    )


def _same_columns(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None or a is b:
        return a is b
    # A graph cannot depend on what they hold.
    return not torch.compiler.is_compiling() and torch.equal(a, b)
