"""Random packed weights for benchmarks, and what a peer dequantises from the same bytes."""

from __future__ import annotations

from math import prod

import torch

from monograph.ops.formats import SCALE_GROUP, BlockShape, format_named
from monograph.ops.layout import make_layout
from monograph.ops.quantize import dynamic_map, quantize

BLOCK = 64
GROUP = 128  # of int4; int8 and FP8 have a row
# Where ggml's blocks have fp16 numbers, if not at their beginning alone.
_HALVES = {"q6_k": (208,), "q4_k": (0, 2), "q5_k": (0, 2), "q4_1": (0, 2), "q5_1": (0, 2)}


class Weights:
    """`copies` packed weights of one shape, and as many bytes of dense ones."""

    peer = ""  # whose dequantisation peer_dense() is

    def __init__(self, rows: int, cols: int, copies: int, fmt: str, block: int) -> None:
        self.fmt = format_named(fmt)
        self.layout = make_layout(self.fmt.number, block, (rows, cols))
        self.shape = (rows, cols)
        self.copies = copies
        dense = (torch.randn(rows, cols) * 0.02).bfloat16()
        self.dense = dense.repeat(max(1, -(-copies * self.fmt.bits // 16)), 1, 1)

    def packed(self, i: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        raise NotImplementedError

    def peer_dense(self, i: int) -> torch.Tensor:
        raise NotImplementedError


class AbsmaxWeights(Weights):
    """nf4 or fp4 in blocks of 64."""

    peer = "bitsandbytes"

    def __init__(self, rows: int, cols: int, copies: int, double_quant: bool, fmt: str) -> None:
        super().__init__(rows, cols, copies, fmt, BLOCK)
        blocks = rows * cols // BLOCK
        groups = -(-blocks // SCALE_GROUP)
        self.values = torch.randint(0, 256, (copies, rows, cols // 2), dtype=torch.uint8)
        self.codes = torch.randint(0, 256, (copies, blocks), dtype=torch.uint8)
        self.groups = (torch.rand(copies, groups) * 0.01).view(torch.uint8)
        self.absmax = torch.rand(copies, blocks) * 0.1
        self.map = dynamic_map().view(torch.uint8)
        self.offset = torch.tensor([0.05]).view(torch.uint8)
        self.double_quant = double_quant

    def packed(self, i: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        i %= self.copies
        if self.double_quant:
            return self.values[i], [self.codes[i], self.groups[i], self.map, self.offset]
        return self.values[i], [self.absmax[i].view(torch.uint8)]

    def peer_dense(self, i: int) -> torch.Tensor:
        """The weight as bitsandbytes dequantises it on each use, nested scales included."""
        i %= self.copies
        ops = torch.ops.bitsandbytes
        absmax = self.absmax[i]
        if self.double_quant:
            absmax = ops.dequantize_blockwise(
                self.codes[i], self.groups[i].view(torch.float32), dynamic_map(), SCALE_GROUP, torch.float32
            )
            absmax = absmax + 0.05
        packed = self.values[i].reshape(-1, 1)
        return ops.dequantize_4bit(packed, absmax, BLOCK, self.fmt.name, self.shape, torch.bfloat16)


class ElementWeights(Weights):
    """MXFP4, MXFP8, NVFP4 or FP8 blocks; codes as often as normal weights have them, no NaN."""

    def __init__(self, rows: int, cols: int, copies: int, fmt: str) -> None:
        block = format_named(fmt).default_block
        super().__init__(rows, cols, copies, fmt, block)
        self.peer = "torchao" if "mx" in fmt or fmt == "nvfp4" else ""
        values = torch.randint(0, 256, (rows, cols * self.fmt.bits // 8), dtype=torch.uint8)
        if self.fmt.bits == 8:  # largest of a block about four times the deviation
            values = (torch.randn(rows, cols) * 100).to(torch.float8_e4m3fn).view(torch.uint8)
            values[values & 0x7F == 0x7F] = 0x3C
        self.values = values.repeat(copies, 1, 1)
        blocks = prod(self.fmt.grid(self.shape, block))
        kind = self.fmt.scale_types[0]
        if kind == "float32":
            self.scales = (torch.rand(copies, blocks) * 1e-3).view(torch.uint8)
        else:
            low, high = (116, 121) if kind == "e8m0" else (0x40, 0x7F)
            self.scales = torch.randint(low, high, (copies, blocks), dtype=torch.uint8)
        self.tensor = torch.tensor([1e-4]).view(torch.uint8)

    def packed(self, i: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        i %= self.copies
        tail = [self.tensor] if self.fmt.tensor_scale else []
        return self.values[i], [self.scales[i], *tail]

    def peer_dense(self, i: int) -> torch.Tensor:
        """What torchao's CPU path does before it multiplies."""
        from torchao.prototype.mx_formats.mx_tensor import to_dtype
        from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

        values, (scales, *_) = self.packed(i)
        scales = scales.reshape(self.shape[0], -1)
        if self.fmt.tensor_scale:
            tensor = self.tensor.view(torch.float32)[0]
            e4m3 = scales.view(torch.float8_e4m3fn)
            return NVFP4Tensor(values, e4m3, 16, torch.bfloat16, tensor).dequantize(torch.bfloat16)
        e8m0 = scales.view(torch.float8_e8m0fnu)
        if self.fmt.bits == 4:
            return to_dtype(values, e8m0, torch.float4_e2m1fn_x2, 32, torch.bfloat16)
        return to_dtype(values.view(torch.float8_e4m3fn), e8m0, torch.float8_e4m3fn, 32, torch.bfloat16)


class RowWeights(Weights):
    """Groups of a row, and ggml's blocks: formats whose rows products decode through a pointer."""

    def __init__(self, rows: int, cols: int, copies: int, fmt: str) -> None:
        info = format_named(fmt)
        grouped = info.shape is BlockShape.GROUP
        block = GROUP if info.bits == 4 else cols
        super().__init__(rows, cols, copies, fmt, block if grouped else info.default_block)
        self.scales: list[torch.Tensor] = []
        if grouped:
            values, *self.scales = quantize(self.dense[0], info.number, block, False, False)
            self.values = values.reshape(rows, -1).repeat(copies, 1, 1)
            return
        blocks = rows * cols // info.default_block
        self.values = torch.randint(0, 256, (copies, blocks, info.block_bytes), dtype=torch.uint8)
        half = torch.tensor([1e-3], dtype=torch.float16).view(torch.uint8)
        for at in _HALVES.get(fmt, (0,)):
            self.values[:, :, at : at + 2] = half
        self.values = self.values.reshape(copies, rows, -1)

    def packed(self, i: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return self.values[i % self.copies], self.scales
