"""monograph::split_quantize."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from monograph.ops import library  # noqa: F401  (the schema is registered there)
from monograph.ops.argument_checks import check_float, check_tensors, require
from monograph.ops.formats import BlockShape, Format, format_numbered
from monograph.ops.has_kernel import has_kernel
from monograph.ops.quantize import portable_quantize

ALIGNMENT = 64  # kPartAlignment of core/monograph/kernels/quantize/split_quantize.h


class Part(NamedTuple):
    """Bytes of a buffer. Sizes may be symbols."""

    begin: Any
    size: Any


def split_quantize(
    input: torch.Tensor,
    splits: Sequence[int],
    format: int,
    block: int,
    rowwise: bool,
    columnwise: bool,
    saturate_nonfinite: bool,
    rule: int,
) -> list[torch.Tensor]:
    """The buffers of the wanted usages, all uint8 and flat. Most people call `monograph.split_quantize`."""
    return torch.ops.monograph.split_quantize(
        input.detach().contiguous(),
        splits,
        format,
        block,
        rowwise,
        columnwise,
        saturate_nonfinite,
        rule,
    )


def _padded(size: Any) -> Any:
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def places(fmt: Format, block: int, shapes: Sequence[Sequence[Any]]) -> tuple[list[list[Part]], Any]:
    """[values, *scales] of each matrix in a buffer, and the buffer's size: one matrix behind the other."""
    found: list[list[Part]] = []
    begin: Any = 0
    for rows, cols in shapes:
        if fmt.shape is BlockShape.SQUARE:
            blocks = prod(fmt.grid([rows, cols], block))
        else:
            blocks = (rows * cols + block - 1) // block
        sizes = [(rows * cols * fmt.bits + 7) // 8, fmt.scale_bytes(None) * blocks]
        parts = []
        for size in [*sizes, 4] if fmt.tensor_scale else sizes:
            parts.append(Part(begin, size))
            begin = begin + _padded(size)
        found.append(parts)
    return found, begin


def _check_numbers(format: int, block: int, rule: int) -> Format:
    try:
        fmt = format_numbered(format)
    except ValueError as error:
        raise ValueError(f"split_quantize: {error}") from None
    grouped = f"format {fmt.name} has groups of a row, wanted another"
    require(fmt.shape is not BlockShape.GROUP, "split_quantize", grouped)
    found = f"format {fmt.name} is read and trained on, nothing quantises to it"
    require(bool(fmt.rules), "split_quantize", found)
    wanted = f"block size is {block}, format {fmt.name} wants one of {fmt.block_sizes}"
    require(block in fmt.block_sizes, "split_quantize", wanted)
    rules = [fmt.rule_number(name) for name in fmt.rules]
    found = f"rule is {rule}, format {fmt.name} wants 0 or one of {rules}"
    require(rule in (0, *rules), "split_quantize", found)
    return fmt


def _check_input(input: torch.Tensor) -> None:
    plain = input.layout is torch.strided
    require(plain, "split_quantize", f"input is {input.layout}, wanted an ordinary tensor")
    require(
        input.dim() == 2, "split_quantize", f"input has {input.dim()} dimensions, wanted 2: rows and columns"
    )


def _check_splits(input: torch.Tensor, splits: Sequence[int]) -> None:
    rows = input.shape[0]
    fits = all(split >= 0 for split in splits) and sum(splits) == rows
    require(fits, "split_quantize", f"splits are {list(splits)}, the input has {rows} rows")


def _usages(rowwise: bool, columnwise: bool) -> list[bool]:
    return [transposed for transposed, wanted in ((False, rowwise), (True, columnwise)) if wanted]


def _quantize_on(device: torch.device) -> Callable[..., Any]:
    """The kernel of `quantize` where there is one and none that splits: on CUDA."""
    by_kernel = has_kernel("quantize", device) and not has_kernel("split_quantize", device)
    return torch.ops.monograph.quantize.default if by_kernel else portable_quantize


def portable_split_quantize(
    input: torch.Tensor,
    splits: Sequence[int],
    format: int,
    block: int,
    rowwise: bool,
    columnwise: bool,
    saturate_nonfinite: bool,
    rule: int,
) -> list[torch.Tensor]:
    """The operator matrix by matrix, for any device; in aten operations, and a second reference in the tests,
    unless the device has a kernel of `quantize` alone."""
    check_tensors("split_quantize", input=input)
    check_float("split_quantize", "input", input)
    fmt = _check_numbers(format, block, rule)
    _check_input(input)
    _check_splits(input, splits)
    buffers, quantize = [], _quantize_on(input.device)
    for transposed in _usages(rowwise, columnwise):
        matrices = [piece.mT.contiguous() if transposed else piece for piece in input.split(list(splits))]
        if fmt.shape is BlockShape.ROW:
            for number, matrix in enumerate(matrices):
                if matrix.shape[1] % block:
                    usage = " columnwise" if transposed else ""
                    raise ValueError(
                        f"split_quantize: split {number}{usage}: rows have {matrix.shape[1]} elements, "
                        f"format {fmt.name} wants a multiple of {block}"
                    )
        lying, size = places(fmt, block, [m.shape for m in matrices])
        buffer = torch.zeros(size, dtype=torch.uint8, device=input.device)
        for matrix, parts in zip(matrices, lying, strict=True):
            packed = quantize(matrix, format, block, False, saturate_nonfinite, rule, 0)
            for part, data in zip(parts, packed, strict=True):
                buffer[part.begin : part.begin + part.size] = data
        buffers.append(buffer)
    return buffers


@torch.library.register_fake("monograph::split_quantize")
def _(input, splits, format, block, rowwise, columnwise, saturate_nonfinite, rule):  # type: ignore[no-untyped-def]
    fmt = _check_numbers(format, block, rule)
    _check_input(input)
    _check_splits(input, splits)
    cols = input.shape[1]
    buffers = []
    for transposed in _usages(rowwise, columnwise):
        shapes = [(cols, rows) if transposed else (rows, cols) for rows in splits]
        buffers.append(input.new_empty([places(fmt, block, shapes)[1]], dtype=torch.uint8))
    return buffers


torch.library.impl("monograph::split_quantize", "CompositeExplicitAutograd")(portable_split_quantize)
