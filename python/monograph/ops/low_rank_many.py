"""monograph::low_rank_many and low_rank_many_dx: x times the factor of each adapter, on its own rows.

    low_rank_many:     u[rows of i, :r_i]  = x[rows of i] factors[i]^T        factors[i] [r_i, cols]
    low_rank_many_dx:  dx[rows of i, :c_i] = du[rows of i, :r_i] factors[i]   factors[i] [r_i, c_i]

Whose rows are whose is data (`monograph.ops.row_ranges`). `width` is the number of columns of the result;
what no adapter fills is -0.0, which added to any number gives that number: the results of two calls, for
adapters with and without dropout, are put together by an addition that changes no bit.

Each row has the bits that `linear` gives it, called for this adapter alone. Differentiable once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from monograph.ops import library  # noqa: F401  (the schemas are registered there)
from monograph.ops.argument_checks import check_rows, check_tensors, require
from monograph.ops.autocast import autocast_rule, cast, without_autocast
from monograph.ops.autograd import register_autograd, register_not_differentiable
from monograph.ops.gram_many import gram_many
from monograph.ops.layout import plain_layout
from monograph.ops.linear import portable_linear, portable_linear_dx
from monograph.ops.row_ranges import Tensors, check_factors, check_starts, ranges, read_starts, rows_in

_MOST_WIDTH = 1 << 20


def low_rank_many(x: torch.Tensor, factors: Tensors, starts: torch.Tensor, width: int) -> torch.Tensor:
    """[..., width] in the dtype of x: x factors[i]^T in the first columns of the rows of adapter i."""
    return torch.ops.monograph.low_rank_many(x, list(factors), starts, width)


def low_rank_many_dx(du: torch.Tensor, factors: Tensors, starts: torch.Tensor, width: int) -> torch.Tensor:
    """[..., width]: du factors[i] in the first columns of the rows of adapter i."""
    return torch.ops.monograph.low_rank_many_dx(du, list(factors), starts, width)


def _check_width(op: str, width: int) -> None:
    require(0 <= width <= _MOST_WIDTH, op, f"width is {width}, wanted 0 to {_MOST_WIDTH}")


def _check(op: str, x: torch.Tensor, factors: Tensors, width: int, side: int) -> None:
    """`side`: the dimension of a factor that meets the columns of x."""
    what = "x" if side else "du"
    check_tensors(op, **{what: x}, factors=factors)
    check_rows(op, what, x)
    check_factors(op, "factors", factors, [(None, None)] * len(factors))
    for i, factor in enumerate(factors):
        inner, outer = factor.shape[side], factor.shape[1 - side]
        if inner == 0 or outer == 0:
            continue
        if side:
            require(inner == x.shape[-1], op, f"x has {x.shape[-1]} columns, factors[{i}] has {inner}")
        else:
            found = f"du has {x.shape[-1]} columns, factors[{i}] has {inner} rows"
            require(inner <= x.shape[-1], op, f"{found}, wanted at most as many")
        require(outer <= width, op, f"width is {width}, factors[{i}] gives {outer} columns")
    _check_width(op, width)


def _portable(
    op: str, x: torch.Tensor, factors: Tensors, starts: torch.Tensor, width: int, side: int
) -> torch.Tensor:
    _check(op, x, factors, width, side)
    linears = (portable_linear, torch.ops.monograph.linear, 4)
    product, kernel, absent = linears if side else (portable_linear_dx, torch.ops.monograph.linear_dx, 2)
    product = product if x.dtype == torch.float64 else kernel
    out = x.new_full((*x.shape[:-1], width), -0.0)
    read = read_starts(op, starts, len(factors), x)
    rows, filled = (t.reshape(rows_in(x), t.shape[-1]) for t in (x, out))
    for i, own in ranges(read):
        factor = factors[i]
        if factor.numel():
            inner, outer = factor.shape[side], factor.shape[1 - side]
            weight, layout = factor.contiguous(), plain_layout(factor.shape)
            filled[own, :outer] = product(rows[own, :inner], weight, [], layout, *[None] * absent)
    return out


def portable_low_rank_many(
    x: torch.Tensor, factors: Tensors, starts: torch.Tensor, width: int
) -> torch.Tensor:
    """One call of `linear` for each adapter that has rows."""
    return _portable("low_rank_many", x, factors, starts, width, 1)


def portable_low_rank_many_dx(
    du: torch.Tensor, factors: Tensors, starts: torch.Tensor, width: int
) -> torch.Tensor:
    """One call of `linear_dx` for each adapter that has rows."""
    return _portable("low_rank_many_dx", du, factors, starts, width, 0)


torch.library.impl("monograph::low_rank_many", "CompositeExplicitAutograd")(portable_low_rank_many)
torch.library.impl("monograph::low_rank_many_dx", "CompositeExplicitAutograd")(portable_low_rank_many_dx)


def _fake(
    op: str, x: torch.Tensor, factors: Tensors, starts: torch.Tensor, width: int, side: int
) -> torch.Tensor:
    what, columns = ("x", "cols") if side else ("du", "rank")
    check_tensors(op, **{what: x}, factors=factors)
    require(x.dim() >= 1, op, f"{what} has no dimensions, wanted [..., {columns}]")
    _check_width(op, width)
    check_starts(op, starts, len(factors), x)
    return x.new_empty([*x.shape[:-1], width])


@torch.library.register_fake("monograph::low_rank_many")
def _(x, factors, starts, width):  # type: ignore[no-untyped-def]
    return _fake("low_rank_many", x, factors, starts, width, 1)


@torch.library.register_fake("monograph::low_rank_many_dx")
def _(du, factors, starts, width):  # type: ignore[no-untyped-def]
    return _fake("low_rank_many_dx", du, factors, starts, width, 0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, factors, starts, _ = inputs
    ctx.save_for_backward(x if any(f.requires_grad for f in factors) else None, starts, *factors)
    ctx.cols = x.shape[-1]


def _backward(ctx: Any, du: torch.Tensor) -> tuple[Any, ...]:
    x, starts, *factors = ctx.saved_tensors
    dx = None
    if ctx.needs_input_grad[0]:
        dx = low_rank_many_dx(du, [f.to(du.dtype) for f in factors], starts, ctx.cols)
    needed = [bool(need) for need in ctx.needs_input_grad[1]]
    dfactors: list[Any] = [None] * len(factors)
    if any(needed):
        assert x is not None
        dfactors = factor_gradients(du, x, starts, factors, needed, of_left=True)
    return dx, dfactors, None, None


def factor_gradients(
    left: torch.Tensor,
    right: torch.Tensor,
    starts: torch.Tensor,
    factors: Tensors,
    needed: list[bool],
    *,
    of_left: bool,
) -> list[Any]:
    """left^T right on the rows of each adapter, in the shape of its factor; None where it is not needed.
    `of_left`: the rank is that of `left`, whose first columns count; else that of `right`."""
    trained = [need and factor.numel() > 0 for factor, need in zip(factors, needed, strict=True)]
    ranks = [
        factor.shape[0 if of_left else 1] if own else 0 for factor, own in zip(factors, trained, strict=True)
    ]
    others = [(right if of_left else left).shape[-1]] * len(factors)
    found: Sequence[torch.Tensor | None] = [None] * len(factors)
    if any(trained):
        dtype = next(factor.dtype for factor, own in zip(factors, trained, strict=True) if own)
        found = gram_many(
            left, right, starts, *((ranks, others) if of_left else (others, ranks)), dtype=dtype
        )
    return [
        gradient if own else torch.zeros_like(factor) if need else None
        for gradient, factor, need, own in zip(found, factors, needed, trained, strict=True)
    ]


register_autograd("low_rank_many", _backward, _setup_context)
register_not_differentiable("low_rank_many_dx")


@autocast_rule("low_rank_many")
def _autocast(x: torch.Tensor, factors: Tensors, starts: torch.Tensor, width: int) -> torch.Tensor:
    x, factors = cast(x), [cast(factor) for factor in factors]
    with without_autocast(x):
        return torch.ops.monograph.low_rank_many(x, factors, starts, width)


# Whose rows are whose is not known from shapes: counted as if all rows met the widest factor.
def _flops(x, factors, starts, width, **_):  # type: ignore[no-untyped-def]
    rows = 1
    for size in x[:-1]:
        rows *= size
    return 2 * rows * max((shape[0] * shape[1] for shape in factors), default=0)


register_flop_formula(torch.ops.monograph.low_rank_many)(_flops)
register_flop_formula(torch.ops.monograph.low_rank_many_dx)(_flops)
