"""Which sizes a trace leaves open, and what it says about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from monograph.upstream.torch_names import sympy_code


def fixed_sizes(tensor: torch.Tensor, differentiated: bool) -> list[bool]:
    """For each dimension whether its size belongs to a trace. Others are lengths: any size of 2 or more.

    Sizes 0 and 1 are fixed, and the last of a float tensor of up to three dimensions (hidden states, rotary
    tables), which is a width; one of four may be a mask. Of four that are differentiated (keys [batch, heads,
    tokens, size], stacked hidden states [copies, batch, tokens, width]) all but the third.
    """
    fixed = [isinstance(size, int) and size < 2 for size in tensor.shape]
    if fixed and tensor.is_floating_point() and tensor.dim() < 4:
        fixed[-1] = True
    if differentiated and tensor.dim() == 4:
        fixed = [True, True, fixed[2], True]
    return fixed


@dataclass(frozen=True)
class KeptShape:
    sizes: tuple[Callable[..., Any], ...]
    strides: tuple[Callable[..., Any], ...]
    dtype: torch.dtype
    device: torch.device


def kept_shape(value: torch.Tensor, lengths: list[Any]) -> KeptShape:
    """Sizes that were found equal have one name; any of them will do."""
    places = {sympy_code(size): place for place, size in enumerate(lengths)}

    def computed(size: Any) -> Callable[..., Any]:
        code = compile(sympy_code(size), "<size>", "eval")
        used = {name: places[name] for name in code.co_names}
        return lambda *sizes: eval(code, {name: sizes[place] for name, place in used.items()})

    return KeptShape(
        tuple(computed(n) for n in value.shape),
        tuple(computed(n) for n in value.stride()),
        value.dtype,
        value.device,
    )


def guard(env: Any, lengths: list[Any]) -> Callable[[Sequence[int]], bool]:
    """Whether lengths have the relations that tracing relied on."""
    code = env.produce_guards_expression(lengths)
    if code is None:
        return lambda _: True
    return lambda sizes: bool(env.evaluate_guards_expression(code, sizes))
