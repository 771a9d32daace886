"""monograph::gram_many: `gram` on the rows of each adapter, the gradients of its factors.

    out[i] = left[rows of i, :left_cols[i]]^T right[rows of i, :right_cols[i]]

Whose rows are whose is data (`monograph.ops.row_ranges`). Each result has the bits that `gram` gives for
these rows alone; zeros for an adapter without rows. Not differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.flop_counter import register_flop_formula

from monograph.ops import library  # noqa: F401  (the schemas are registered there)
from monograph.ops.argument_checks import check_beside, check_rows, check_tensors, require
from monograph.ops.autograd import register_not_differentiable
from monograph.ops.row_ranges import check_starts, ranges, read_starts, rows_in


def gram_many(
    left: torch.Tensor,
    right: torch.Tensor,
    starts: torch.Tensor,
    left_cols: Sequence[int],
    right_cols: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """One [left_cols[i], right_cols[i]] for each adapter, in `dtype`."""
    return torch.ops.monograph.gram_many(left, right, starts, left_cols, right_cols, dtype)


def _check(
    left: torch.Tensor, right: torch.Tensor, left_cols: Sequence[int], right_cols: Sequence[int]
) -> None:
    op = "gram_many"
    check_tensors(op, left=left, right=right)
    check_rows(op, "left", left)
    check_beside(op, "right", right, left)
    found = f"left_cols has {len(left_cols)} entries, right_cols has {len(right_cols)}"
    require(len(left_cols) == len(right_cols), op, f"{found}, wanted as many")
    for what, t, cols in (("left", left, left_cols), ("right", right, right_cols)):
        for i, count in enumerate(cols):
            fits = 0 <= count <= t.shape[-1]
            require(
                fits, op, f"{what}_cols[{i}] is {count}, wanted 0 to {t.shape[-1]}, the columns of {what}"
            )


def portable_gram_many(
    left: torch.Tensor,
    right: torch.Tensor,
    starts: torch.Tensor,
    left_cols: Sequence[int],
    right_cols: Sequence[int],
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """One call of `gram` for each adapter."""
    _check(left, right, left_cols, right_cols)
    read = read_starts("gram_many", starts, len(left_cols), left)
    out = [left.new_zeros((m, n), dtype=dtype) for m, n in zip(left_cols, right_cols, strict=True)]
    lefts, rights = (t.reshape(rows_in(left), t.shape[-1]) for t in (left, right))
    for i, own in ranges(read):
        if out[i].numel():
            out[i] = torch.ops.monograph.gram(
                lefts[own, : left_cols[i]], rights[own, : right_cols[i]], None, dtype
            )
    return out


torch.library.impl("monograph::gram_many", "CompositeExplicitAutograd")(portable_gram_many)


@torch.library.register_fake("monograph::gram_many")
def _(left, right, starts, left_cols, right_cols, dtype):  # type: ignore[no-untyped-def]
    _check(left, right, left_cols, right_cols)
    check_starts("gram_many", starts, len(left_cols), left)
    return [left.new_empty((m, n), dtype=dtype) for m, n in zip(left_cols, right_cols, strict=True)]


register_not_differentiable("gram_many")


@register_flop_formula(torch.ops.monograph.gram_many)
def _flops(left, right, starts, left_cols, right_cols, dtype=None, **_):  # type: ignore[no-untyped-def]
    rows = 1
    for size in left[:-1]:
        rows *= size
    return 2 * rows * max((m * n for m, n in zip(left_cols, right_cols, strict=True)), default=0)
