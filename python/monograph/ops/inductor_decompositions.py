"""What Inductor sees of our operators on devices without kernels: aten operations, which it fuses.

An operator without a kernel is opaque to it and runs as a row of aten calls. As a decomposition, dequantising
is one generated kernel that writes one dense buffer, and the product after it the library's. The CPU and any
device that has a kernel of its own keep the operator: a decomposition that gives NotImplemented is none.

Inductor may contract a product and a sum into one rounding; nested scales then differ in their last bit from
those of the CPU and of the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from monograph.ops.dequantize import fused_dequantize
from monograph.ops.gram import product_of_rows
from monograph.ops.has_kernel import has_kernel
from monograph.ops.layout import PLAIN, read_matrix
from monograph.ops.seeded_dropout import hashed_dropout
from monograph.upstream.torch_names import recomputed_in_backward

Tensors = Sequence[torch.Tensor]


def stays_opaque(name: str, device: torch.device) -> bool:
    return device.type == "cpu" or has_kernel(name, device)


def _dense(values: torch.Tensor, scales: Tensors, layout: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    own = read_matrix("linear", layout)
    if own.format == PLAIN:
        return values.reshape(own.shape).to(dtype)
    return dequantize(values, scales, layout, dtype)


def dequantize(
    values: torch.Tensor, scales: Tensors, layout: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    # A partitioner would rather keep the dense weight for the backward than decode it a second time.
    with recomputed_in_backward():
        return fused_dequantize(values, scales, layout, dtype)


def linear(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: Tensors,
    layout: Sequence[int],
    bias: torch.Tensor | None = None,
    u: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    a: torch.Tensor | None = None,
) -> torch.Tensor:
    y = torch.nn.functional.linear(x, _dense(values, scales, layout, x.dtype), bias)
    return y if u is None or b is None else y + torch.nn.functional.linear(u, b.to(x.dtype))


def linear_dx(
    dy: torch.Tensor,
    values: torch.Tensor,
    scales: Tensors,
    layout: Sequence[int],
    du: torch.Tensor | None = None,
    a: torch.Tensor | None = None,
) -> torch.Tensor:
    dx = dy @ _dense(values, scales, layout, dy.dtype)
    return dx if du is None or a is None else dx + du @ a.to(dy.dtype)


def gram(
    left: torch.Tensor, right: torch.Tensor, sum: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    return product_of_rows(left, right, sum, dtype)


def seeded_dropout(x: torch.Tensor, seed: torch.Tensor, stream: int, probability: float) -> torch.Tensor:
    return hashed_dropout(x, seed, stream, probability, panel=2**31)


FUSED: dict[str, Callable[..., torch.Tensor]] = {
    "dequantize": dequantize,
    "gram": gram,
    "linear": linear,
    "linear_dx": linear_dx,
    "seeded_dropout": seeded_dropout,
}


def unless_kernel(name: str) -> Callable[..., Any]:
    fused = FUSED[name]

    def decompose(first: torch.Tensor, *rest: Any, **options: Any) -> Any:
        if stays_opaque(name, first.device):
            return NotImplemented
        return fused(first, *rest, **options)

    return decompose


def decomposed_names() -> list[str]:
    """The operators that the machine's accelerator has no kernel of; none without an accelerator."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return [] if device is None else [name for name in FUSED if not stays_opaque(name, device)]


def install() -> None:
    """Called when Inductor's table of decompositions is there. inductor_fallbacks.py keeps the operators
    beside their entries for the CPU's graphs."""
    from monograph.upstream.torch_names import inductor_decompositions

    for name in decomposed_names():
        operator = getattr(torch.ops.monograph, name).default
        inductor_decompositions.setdefault(operator, unless_kernel(name))
