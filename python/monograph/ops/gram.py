"""monograph::gram: sums over rows of outer products, the gradients of LoRA factors.

    out = sum + left^T right

The rows are those of all leading dimensions. On the CPU each element is one chain of fused multiply-adds in
float32, in the order of the rows, rounded once, to `dtype`: the same bits on every instruction set, for any
number of threads, and if the rows come in slices of which each continues the float32 sum of the one before.

Differentiable any number of times. No forward mode.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from monograph.ops import library  # noqa: F401  (the schemas are registered there)
from monograph.ops.argument_checks import (
    check_beside,
    check_float,
    check_rows,
    check_shape,
    check_tensors,
    require,
)
from monograph.ops.autograd import register_autograd
from monograph.ops.layout import plain_layout

_OUTPUTS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # the last: no kernel, as elsewhere


def gram(
    left: torch.Tensor,
    right: torch.Tensor,
    sum: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`sum` + left^T right in `dtype`: [..., m] and [..., n] to [m, n]. `sum` is float32."""
    return torch.ops.monograph.gram(left, right, sum, dtype)


def _check(
    left: torch.Tensor, right: torch.Tensor, sum: torch.Tensor | None, dtype: torch.dtype
) -> tuple[int, int]:
    check_tensors("gram", left=left, right=right, sum=sum)
    check_rows("gram", "left", left)
    check_beside("gram", "right", right, left)
    require(dtype in _OUTPUTS, "gram", f"the output is {dtype}, wanted bfloat16, float16 or float32")
    shape = (left.shape[-1], right.shape[-1])
    if sum is not None:
        check_float("gram", "sum", sum)
        require(sum.dtype == torch.float32, "gram", f"sum is {sum.dtype}, wanted float32")
        check_shape("gram", "sum", sum, shape)
    return shape


def product_of_rows(
    left: torch.Tensor, right: torch.Tensor, sum: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """By the library's product, in the dtype of the factors unless more is wanted."""
    rows, cols = left.reshape(-1, left.shape[-1]), right.reshape(-1, right.shape[-1])
    if sum is None and dtype == left.dtype:
        return rows.t() @ cols
    wide = torch.promote_types(left.dtype, torch.float32)
    product = rows.t().to(wide) @ cols.to(wide)
    return (product if sum is None else sum + product).to(dtype)


def portable_gram(
    left: torch.Tensor, right: torch.Tensor, sum: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The operator in aten operations, for any device; the order of the sum is the library's."""
    shape = _check(left, right, sum, dtype)
    if left.shape[:-1].numel() == 0 or prod(shape) == 0:
        empty = left.new_zeros(shape, dtype=torch.float32) if sum is None else sum
        return empty.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return product_of_rows(left, right, sum, dtype)


torch.library.impl("monograph::gram", "CompositeExplicitAutograd")(portable_gram)


@torch.library.register_fake("monograph::gram")
def _(left, right, sum, dtype):  # type: ignore[no-untyped-def]
    return left.new_empty(_check(left, right, sum, dtype), dtype=dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    left, right, _, _ = inputs
    ctx.save_for_backward(left, right)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    left, right = ctx.saved_tensors
    factor = gradient.to(left.dtype).contiguous()
    layout = plain_layout(factor.shape)
    dleft = dright = dsum = None
    if ctx.needs_input_grad[0]:
        dleft = torch.ops.monograph.linear(right, factor, [], layout, None, None, None, None)
    if ctx.needs_input_grad[1]:
        dright = torch.ops.monograph.linear_dx(left, factor, [], layout, None, None)
    if ctx.needs_input_grad[2]:
        dsum = gradient.to(torch.float32)
    return dleft, dright, dsum, None


register_autograd("gram", _backward, _setup_context)


@register_flop_formula(torch.ops.monograph.gram)
def _flops(left, right, sum=None, dtype=None, **_):  # type: ignore[no-untyped-def]
    return 2 * prod(left) * right[-1]
