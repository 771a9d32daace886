"""The dense weight of one expert, given as a tensor [1], out of a stack: aten operations, for any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from monograph.ops.argument_checks import grids_of
from monograph.ops.dequantize import PANEL, decode_in_panels, portable_scales
from monograph.ops.dequantize_blocks import decode_blocks
from monograph.ops.dequantize_groups import decode_groups
from monograph.ops.experts_arguments import Stack
from monograph.ops.formats import BlockShape, format_numbered, value_table
from monograph.ops.layout import PLAIN


class StackDecoder:
    """Of a stack [E, rows, cols], or with `transposed` [E, cols, rows]; values are rounded to `kind`, the
    dtype of x, and widened to `wide`."""

    def __init__(self, stack: Stack, transposed: bool, kind: torch.dtype, wide: torch.dtype) -> None:
        self.values, scales, self.layout = stack
        self.experts, *sizes = self.layout.shape
        self.rows, self.cols = reversed(sizes) if transposed else sizes
        self.transposed, self.kind, self.wide = transposed, kind, wide
        if self.layout.format != PLAIN:
            self._read_scales(scales)

    def _read_scales(self, scales: Sequence[torch.Tensor]) -> None:
        layout, fmt = self.layout, format_numbered(self.layout.format)
        self.by_rows = fmt.shape in (BlockShape.GROUP, BlockShape.INTERLEAVED)
        if self.by_rows:  # every matrix has its own bytes
            self.through, self.scales = False, list(scales)
            return
        grids = grids_of("experts", self.values, scales, layout)
        per_block = [portable_scales(fmt, own, part.stored_shape(fmt), part.block) for _, own, part in grids]
        # Blocks that run through all experts have one row of scales, others one for each matrix.
        self.through = layout.grid_rows == 0 and fmt.shape is BlockShape.FLAT
        matrices = 1 if self.through else max(len(grids), self.experts)
        self.block_scales = torch.cat(per_block).reshape(matrices, -1)
        self.codes = self.values.reshape(matrices, -1)

    def weight(self, expert: torch.Tensor) -> torch.Tensor:
        """[rows, cols], rounded to the dtype of x and widened again. Both exist for a moment, and a panel's
        intermediates, but no index for each element."""
        if self.layout.format == PLAIN:
            shape = (self.cols, self.rows) if self.transposed else (self.rows, self.cols)
            dense = self.values.reshape(self.experts, *shape).index_select(0, expert)[0].to(self.kind)
            return (dense.t() if self.transposed else dense).to(self.wide)
        return self._decoded(expert).reshape(self.rows, self.cols).to(self.wide)

    def _decoded(self, expert: torch.Tensor) -> torch.Tensor:
        """In the dtype of x, flat."""
        fmt, block = format_numbered(self.layout.format), self.layout.block
        elements = self.rows * self.cols
        if self.by_rows:
            return self._decoded_rows(expert)
        if self.through and (elements % block or self.layout.origin):
            return self._decoded_across(expert)
        matrices = 1 if self.through else self.codes.shape[0] // self.experts  # of one expert
        own = expert * matrices + torch.arange(matrices, device=expert.device)
        count = self.experts * matrices
        codes = self.codes.reshape(count, -1).index_select(0, own)
        scales = self.block_scales.reshape(count, -1).index_select(0, own)
        shape = (self.rows // matrices, self.cols)
        parts = [decode_in_panels(fmt, block, codes[i], scales[i], shape, self.kind) for i in range(matrices)]
        return parts[0] if matrices == 1 else torch.cat(parts)

    def _decoded_rows(self, expert: torch.Tensor) -> torch.Tensor:
        """Of a format whose rows are decoded one by one: groups of a row, blocks with their scales."""
        fmt, block = format_numbered(self.layout.format), self.layout.block
        decode = decode_groups if fmt.shape is BlockShape.GROUP else decode_blocks
        rows = self.layout.grid_rows or self.rows
        each = self.rows // rows
        own = expert * each + torch.arange(each, device=expert.device)
        values, *scales = (
            t.reshape(self.experts * each, -1).index_select(0, own) for t in (self.values, *self.scales)
        )
        parts = [
            decode(fmt, block, values[i], [s[i] for s in scales], (rows, self.cols), self.kind, PANEL)
            for i in range(each)
        ]
        return parts[0] if each == 1 else torch.cat(parts)

    def _decoded_across(self, expert: torch.Tensor) -> torch.Tensor:
        """Where a block lies on two experts, or the stack is a part of one: codes and scales by the index of
        each element, in panels."""
        fmt, elements = format_numbered(self.layout.format), self.rows * self.cols
        table = value_table(fmt, self.values.device)
        out = torch.empty(elements, dtype=self.kind, device=expert.device)
        for begin in range(0, elements, PANEL // 4):
            end = min(begin + PANEL // 4, elements)
            at = self.layout.origin + expert * elements + torch.arange(begin, end, device=expert.device)
            codes = self.codes[0].index_select(0, at * fmt.bits // 8).int()
            if fmt.bits == 4:
                codes = (codes >> torch.where(at % 2 == (1 if fmt.low_nibble_first else 0), 4, 0)) & 15
            scales = self.block_scales[0].index_select(0, at // self.layout.block)
            out[begin:end] = (table.index_select(0, codes.int()) * scales).to(self.kind)
        return out
