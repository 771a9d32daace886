"""Dense weights of experts, given as a tensor of their numbers, out of a stack: for any device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from monograph.ops.argument_checks import grids_of, shared_scales
from monograph.ops.dequantize import PANEL, decode_in_panels, portable_scales
from monograph.ops.dequantize_blocks import decode_blocks
from monograph.ops.dequantize_groups import decode_groups
from monograph.ops.experts_arguments import Stack
from monograph.ops.formats import BlockShape, format_numbered, value_table
from monograph.ops.layout import PLAIN, make_layout


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
        # Blocks that run through all experts have one row of scales, others one for each matrix.
        self.through = layout.grid_rows == 0 and fmt.shape is BlockShape.FLAT
        per_expert = self.rows // layout.grid_rows if layout.grid_rows else 1
        self.matrices = 1 if self.through else self.experts * per_expert
        self.scales, self.codes = list(scales), self.values.reshape(self.matrices, -1)

    @cached_property
    def block_scales(self) -> torch.Tensor:
        """Of each matrix one number for each block, in float32."""
        fmt = format_numbered(self.layout.format)
        grids = grids_of("experts", self.values, self.scales, self.layout)
        found = [portable_scales(fmt, own, part.stored_shape(fmt), part.block) for _, own, part in grids]
        return torch.cat(found).reshape(self.matrices, -1)

    def weights(self, experts: torch.Tensor) -> torch.Tensor:
        """[n, rows, cols] in the dtype of x, by the device's `dequantize` where each expert has its bytes."""
        if self.layout.format == PLAIN:
            shape = (self.cols, self.rows) if self.transposed else (self.rows, self.cols)
            dense = self.values.reshape(self.experts, *shape).index_select(0, experts).to(self.kind)
            return dense.transpose(1, 2) if self.transposed else dense
        if (parts := self._bytes_of(experts)) is not None:
            whole = (experts.shape[0], self.rows, self.cols)
            layout = make_layout(self.layout.format, self.layout.block, whole, 0, self.layout.grid_rows)
            return torch.ops.monograph.dequantize(parts[0], parts[1:], layout, self.kind)
        dense = torch.empty([experts.shape[0], self.rows, self.cols], dtype=self.kind, device=experts.device)
        for i in range(experts.shape[0]):
            dense[i] = self._decoded(experts[i : i + 1]).reshape(self.rows, self.cols)
        return dense

    def _bytes_of(self, experts: torch.Tensor) -> list[torch.Tensor] | None:
        """Values and scales of these alone; None where blocks or scales are not each expert's own."""
        fmt, elements = format_numbered(self.layout.format), self.rows * self.cols
        if self.by_rows:
            if fmt.shape is BlockShape.INTERLEAVED and self.scales:  # a row map
                return None
        elif self.through and (elements % self.layout.block or self.layout.origin):
            return None
        scales, shared = self.scales, {}
        if not self.by_rows:
            if "float32" in fmt.scale_types:
                scales = [self.block_scales.view(torch.uint8)]
            elif self.experts > 1 or self.matrices > 1:
                shared = shared_scales(self.layout, scales)
        taken = [self.values.reshape(self.experts, -1).index_select(0, experts).reshape(-1)]
        for i, scale in enumerate(scales):
            one = scale.numel() == shared.get(i)
            own = scale if one else scale.reshape(self.experts, -1).index_select(0, experts)
            taken.append(own.reshape(-1))
        return taken

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
