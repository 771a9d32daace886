"""monograph::sum_rows_many: the sum over the rows of each adapter, the gradient of its bias.

Whose rows are whose is data (`monograph.ops.row_ranges`). Each sum has the bits of torch's on these rows
alone. No C++ of ours stands behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from monograph.ops import library  # noqa: F401  (creates the namespace)
from monograph.ops.argument_checks import check_rows, check_tensors
from monograph.ops.autograd import register_not_differentiable
from monograph.ops.row_ranges import check_starts, ranges, read_starts, rows_in

torch.library.define("monograph::sum_rows_many", "(Tensor dy, Tensor starts, bool[] need) -> Tensor[]")


def sum_rows_many(dy: torch.Tensor, starts: torch.Tensor, need: Sequence[bool]) -> list[torch.Tensor]:
    """One [columns] for each adapter in the dtype of dy: zeros without rows, [0] where none is
    needed."""
    found: list[torch.Tensor] = torch.ops.monograph.sum_rows_many(dy, starts, need)
    return found


@torch.library.impl("monograph::sum_rows_many", "CompositeExplicitAutograd")
def _sum_rows_many(dy: torch.Tensor, starts: torch.Tensor, need: Sequence[bool]) -> list[torch.Tensor]:
    check_tensors("sum_rows_many", dy=dy)
    check_rows("sum_rows_many", "dy", dy)
    read = read_starts("sum_rows_many", starts, len(need), dy)
    out = [dy.new_zeros(dy.shape[-1] if one else 0) for one in need]
    rows = dy.reshape(rows_in(dy), dy.shape[-1])
    for i, own in ranges(read):
        if need[i]:
            out[i] = rows[own].sum(0)
    return out


@torch.library.register_fake("monograph::sum_rows_many")
def _(dy, starts, need):  # type: ignore[no-untyped-def]
    check_tensors("sum_rows_many", dy=dy)
    check_rows("sum_rows_many", "dy", dy)
    check_starts("sum_rows_many", starts, len(need), dy)
    return [dy.new_empty(dy.shape[-1] if one else 0) for one in need]


register_not_differentiable("sum_rows_many")
