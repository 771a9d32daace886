"""monograph::combine_slots: the rows of slots, weighted and summed for each token.

    out[t] = sum over j of weights[t, j] * rows[places[t, j]]      in the order of j, from +0

Products and sums are float32, nothing is fused, and the sum is rounded once to the dtype of rows: what
`experts` does with the slots of a token. A place outside [0, len(rows)) adds nothing; without weights the
rows themselves are summed. Not differentiable: it stands inside operators that have gradients of their own.
"""

from __future__ import annotations

import torch

from monograph.ops import library  # noqa: F401  (the schemas are registered there)
from monograph.ops.argument_checks import check_float, check_shape, check_tensors, dtype_name, require
from monograph.ops.autograd import register_without_gradient

_OP = "combine_slots"


def _check_fake(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None) -> None:
    given = {"rows": rows, "places": places} | ({} if weights is None else {"weights": weights})
    check_tensors(_OP, **given)
    for name, t in given.items():
        require(t.dim() == 2, _OP, f"{name} has {t.dim()} dimensions, wanted 2")
    require(places.dtype == torch.int64, _OP, f"places has dtype {dtype_name(places.dtype)}, wanted int64")


def portable_combine_slots(
    rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    _check_fake(rows, places, weights)
    check_float(_OP, "rows", rows)
    if weights is not None:
        check_float(_OP, "weights", weights)
        check_shape(_OP, "weights", weights, list(places.shape))
        fits = weights.dtype in (rows.dtype, torch.float32)
        found = dtype_name(weights.dtype)
        require(fits, _OP, f"weights has dtype {found}, wanted float32 or {dtype_name(rows.dtype)} as rows")
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    total = rows.new_zeros(places.shape[0], rows.shape[1], dtype=wide)
    if rows.shape[0] == 0:
        return total.to(rows.dtype)
    for j in range(places.shape[1]):  # in the order of slots
        place = places[:, j]
        inside = (place >= 0) & (place < rows.shape[0])
        row = rows.index_select(0, torch.where(inside, place, 0)).to(wide)
        if weights is not None:
            row = weights[:, j, None].to(wide) * row
        total = total + torch.where(inside[:, None], row, 0)
    return total.to(rows.dtype)


@torch.library.register_fake("monograph::combine_slots")
def _(rows, places, weights):  # type: ignore[no-untyped-def]
    _check_fake(rows, places, weights)
    return rows.new_empty([places.shape[0], rows.shape[1]])


torch.library.impl("monograph::combine_slots", "CompositeExplicitAutograd")(portable_combine_slots)
register_without_gradient("combine_slots", "the operators that call it have gradients")
