"""monograph::quantize_activation and monograph::dequantize_activation: what a backward pass reads, in 8 bits.

    scale  = max |x| / 127 over a block of 128 elements of a row, in float32
    value  = x / scale, rounded to the nearest integer, ties to even
    x'     = value * scale, rounded once to the dtype of x

So |x' - x| <= scale / 2 plus that rounding, 1/254 of the largest element of the block. A block with NaN or an
infinity comes back as NaN. Nothing is drawn at random and no element depends on another block: the same bits
for any number of threads and rows. No C++ of ours stands behind them; they hold 4 MiB of float32 at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from monograph.ops import library  # noqa: F401  (creates the namespace)
from monograph.ops.argument_checks import check_float, check_rows, check_tensors, dtype_name, require
from monograph.ops.autograd import register_not_differentiable

BLOCK = 128
_LARGEST = 127.0
_PANEL = 1 << 20  # elements in float32 at a time

torch.library.define("monograph::quantize_activation", "(Tensor x) -> (Tensor values, Tensor scales)")
torch.library.define(
    "monograph::dequantize_activation", "(Tensor values, Tensor scales, ScalarType dtype) -> Tensor"
)


def quantize_activation(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """values int8 [..., cols], scales float32 [..., blocks of a row]."""
    values, scales = torch.ops.monograph.quantize_activation(x)
    return values, scales


def dequantize_activation(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.ops.monograph.dequantize_activation(values, scales, dtype)


def _blocks(cols: int) -> int:
    return -(-cols // BLOCK)


def _panels(rows: int, cols: int) -> Iterator[slice]:
    size = max(1, _PANEL // max(cols, 1))
    for begin in range(0, rows, size):
        yield slice(begin, min(begin + size, rows))


def _in_blocks(rows: torch.Tensor) -> torch.Tensor:
    """[rows, blocks, BLOCK] in float32, zeros behind the last column."""
    cols = rows.shape[-1]
    wide = torch.nn.functional.pad(rows.float(), (0, _blocks(cols) * BLOCK - cols))
    return wide.view(rows.shape[0], _blocks(cols), BLOCK)


def _check_x(x: torch.Tensor) -> None:
    op = "quantize_activation"
    check_tensors(op, x=x)
    check_rows(op, "x", x)
    check_float(op, "x", x)


@torch.library.impl("monograph::quantize_activation", "CompositeExplicitAutograd")
def _quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    _check_x(x)
    cols = x.shape[-1]
    rows = x.reshape(x.shape[:-1].numel(), cols)
    values = torch.empty(rows.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty((rows.shape[0], _blocks(cols)), dtype=torch.float32, device=x.device)
    for part in _panels(*rows.shape):
        wide = _in_blocks(rows[part])
        scale = wide.abs().amax(-1) / _LARGEST
        scale = torch.where(scale.isfinite(), scale, torch.nan)
        found = wide.div_(scale[..., None]).round_().nan_to_num_(0.0).clamp_(-_LARGEST, _LARGEST)
        values[part] = found.flatten(1)[:, :cols].to(torch.int8)
        scales[part] = scale
    return values.reshape(x.shape), scales.reshape(*x.shape[:-1], _blocks(cols))


def _check_values(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> None:
    op = "dequantize_activation"
    check_tensors(op, values=values, scales=scales)
    require(values.dim() >= 1, op, "values has no dimensions, wanted [..., cols]")
    require(values.dtype == torch.int8, op, f"values is {dtype_name(values.dtype)}, wanted int8")
    require(scales.dtype == torch.float32, op, f"scales is {dtype_name(scales.dtype)}, wanted float32")
    require(dtype.is_floating_point, op, f"dtype is {dtype_name(dtype)}, wanted a float type")
    wanted = (*values.shape[:-1], _blocks(values.shape[-1]))
    fits = tuple(scales.shape) == wanted
    require(fits, op, f"scales has shape {list(scales.shape)}, wanted {list(wanted)}")


@torch.library.impl("monograph::dequantize_activation", "CompositeExplicitAutograd")
def _dequantize(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    _check_values(values, scales, dtype)
    cols = values.shape[-1]
    rows = values.reshape(values.shape[:-1].numel(), cols)
    factors = scales.reshape(rows.shape[0], _blocks(cols), 1)
    x = torch.empty(rows.shape, dtype=dtype, device=values.device)
    for part in _panels(*rows.shape):
        x[part] = _in_blocks(rows[part]).mul_(factors[part]).flatten(1)[:, :cols].to(dtype)
    return x.reshape(values.shape)


@torch.library.register_fake("monograph::quantize_activation")
def _(x):  # type: ignore[no-untyped-def]
    _check_x(x)
    values = torch.empty_like(x, dtype=torch.int8, memory_format=torch.contiguous_format)
    return values, x.new_empty([*x.shape[:-1], _blocks(x.shape[-1])], dtype=torch.float32)


@torch.library.register_fake("monograph::dequantize_activation")
def _(values, scales, dtype):  # type: ignore[no-untyped-def]
    check_tensors("dequantize_activation", values=values, scales=scales)
    return torch.empty_like(values, dtype=dtype, memory_format=torch.contiguous_format)


register_not_differentiable("quantize_activation")
register_not_differentiable("dequantize_activation")
