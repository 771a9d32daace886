"""monograph::gain_backward_many: `gain_backward` on the rows of each adapter.

    dz[rows of i] = dy * gain[i]; rows of an adapter without a gain are dy as it is
    dgain[i]      = sum over the rows of i of dy * y / gain[i]; zeros for an adapter without rows

Whose rows are whose is data (`monograph.ops.row_ranges`). No C++ of ours stands behind it.
"""

from __future__ import annotations

import torch

from monograph.ops import library  # noqa: F401  (creates the namespace)
from monograph.ops.argument_checks import check_beside, check_rows, check_tensors, check_vector, require
from monograph.ops.autograd import register_not_differentiable
from monograph.ops.row_ranges import Tensors, check_starts, ranges, read_starts, rows_in

torch.library.define(
    "monograph::gain_backward_many",
    "(Tensor dy, Tensor? y, Tensor[] gain, Tensor starts) -> (Tensor, Tensor[])",
)


def gain_backward_many(
    dy: torch.Tensor, y: torch.Tensor | None, gain: Tensors, starts: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """dz in the dtype of dy, and dgain as gain; without y no dgain. A gain without elements is none."""
    found: tuple[torch.Tensor, list[torch.Tensor]] = torch.ops.monograph.gain_backward_many(
        dy, y, list(gain), starts
    )
    return found


def _check(dy: torch.Tensor, y: torch.Tensor | None, gain: Tensors) -> None:
    op = "gain_backward_many"
    check_tensors(op, dy=dy, gain=gain)
    check_rows(op, "dy", dy)
    for i, own in enumerate(gain):
        if own.numel():
            check_vector(op, f"gain[{i}]", own, dy.shape[-1], torch.promote_types(dy.dtype, torch.float32))
    if y is not None:
        check_tensors(op, dy=dy, y=y)
        check_beside(op, "y", y, dy)
        require(y.shape == dy.shape, op, f"y is {list(y.shape)}, wanted {list(dy.shape)} as dy")


@torch.library.impl("monograph::gain_backward_many", "CompositeExplicitAutograd")
def _gain_backward_many(
    dy: torch.Tensor, y: torch.Tensor | None, gain: Tensors, starts: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    _check(dy, y, gain)
    read = read_starts("gain_backward_many", starts, len(gain), dy)
    dz = torch.empty_like(dy, memory_format=torch.contiguous_format)
    dgain = [] if y is None else [torch.zeros_like(own) for own in gain]
    shape = (rows_in(dy), dy.shape[-1])
    rows, out, ys = dy.reshape(shape), dz.view(shape), None if y is None else y.reshape(shape)
    for i, own in ranges(read):
        if gain[i].numel() == 0:
            out[own] = rows[own]
            continue
        out[own], found = torch.ops.monograph.gain_backward(
            rows[own], None if ys is None else ys[own], gain[i]
        )
        if ys is not None:
            dgain[i] = found
    return dz, dgain


@torch.library.register_fake("monograph::gain_backward_many")
def _(dy, y, gain, starts):  # type: ignore[no-untyped-def]
    _check(dy, y, gain)
    check_starts("gain_backward_many", starts, len(gain), dy)
    dz = torch.empty_like(dy, memory_format=torch.contiguous_format)
    return dz, [] if y is None else [torch.empty_like(own) for own in gain]


register_not_differentiable("gain_backward_many")
