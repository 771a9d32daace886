"""monograph::spread_norm: the norm of a gradient of which each rank has its own experts' part, as one node.

A collective (distributed/expert_norm.py). Shapes outside are static: float32 [] of a flat gradient. `ends`
are the places where the tensors of `adamw` end, by whose blocks one process sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from monograph.ops import library  # noqa: F401  (creates the namespace)
from monograph.ops.argument_checks import check_float, check_tensors, require

_OP = "spread_norm"
Norm = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
_NORMS: list[Norm] = []

torch.library.define("monograph::spread_norm", "(Tensor gradient, int[] ends, int norm) -> Tensor")


def register_norm(norm: Norm) -> int:
    """The number by which the operator finds it: of this process, never given twice."""
    _NORMS.append(norm)
    return len(_NORMS) - 1


@torch.library.impl("monograph::spread_norm", "CompositeExplicitAutograd")
def _spread_norm(gradient: torch.Tensor, ends: list[int], norm: int) -> torch.Tensor:
    check_tensors(_OP, gradient=gradient)
    check_float(_OP, "gradient", gradient)
    require(gradient.dim() == 1, _OP, f"gradient has {gradient.dim()} dimensions, wanted 1")
    known = 0 <= norm < len(_NORMS)
    require(known, _OP, f"norm is {norm}, wanted one that a training step has made here")
    with torch.no_grad():
        return _NORMS[norm](gradient, ends)


@torch.library.register_fake("monograph::spread_norm")
def _(gradient, ends, norm):  # type: ignore[no-untyped-def]
    check_tensors(_OP, gradient=gradient)
    return gradient.new_empty((), dtype=torch.float32)
