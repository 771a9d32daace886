"""How a module shows what it computes: its own forward runs on drawn numbers, its parts stood in for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from monograph.ops.providers import may_take_over

KERNEL_TYPES = (torch.bfloat16, torch.float16, torch.float32)
ROWS = 16


def runs_here(operator: str, *tensors: torch.Tensor) -> bool:
    """On one device that the operator has a kernel for, in one dtype that the kernels have."""
    first, where = tensors[0].dtype, tensors[0].device.type
    alike = all(t.device.type == where and t.dtype == first for t in tensors)
    return alike and first in KERNEL_TYPES and where != "meta" and may_take_over(where, operator)


def lies_where(operator: str, module: nn.Module) -> bool:
    """Whether the operator has a kernel for each device that parameters and buffers of the module are on."""
    devices = {tensor.device.type for tensor in (*module.parameters(), *module.buffers())}
    return all(may_take_over(kind, operator) for kind in devices)


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def probe_of(
    module: nn.Module, parameters: Mapping[str, torch.Tensor], children: Mapping[str, nn.Module]
) -> Any:
    """The module with other parameters and children; shares the rest with it, and has no hooks."""
    probe = nn.Module.__new__(type(module))
    nn.Module.__init__(probe)
    empty = dict(probe.__dict__)
    probe.__dict__.update({name: value for name, value in module.__dict__.items() if name not in empty})
    for name, parameter in parameters.items():
        probe.register_parameter(name, nn.Parameter(parameter, requires_grad=False))
    for name, child in children.items():
        probe.add_module(name, child)
    return probe


class Given(nn.Module):
    """Answers with one thing and remembers what it was asked."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer, self.asked = answer, []  # type: ignore[var-annotated]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.asked.append((args, kwargs))
        return self.answer


def tried(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What it computes, without a graph; None where it refuses, as no variant that is known does."""
    try:
        with torch.no_grad():
            return function(*args, **kwargs)
    except Exception:
        return None


def agree(got: torch.Tensor, want: Any, slack: torch.Tensor) -> bool:
    """The same values but for the order of sums: 99 % of the bits of a 16-bit type, a few units of float32.

    `slack` is by how much torch's own float32 may be off; where it matters 16-bit types are not compared.
    """
    if not isinstance(want, torch.Tensor) or want.dtype != got.dtype or want.shape != got.shape:
        return False
    if got.dtype == torch.float32:
        return bool(torch.all((got - want).abs() <= 2**-19 * want.abs() + slack))
    clear = slack <= 2**-18 * want.abs()
    return bool(clear.any()) and float((got != want)[clear].double().mean()) <= 0.01


def same(got: Any, want: Any) -> bool:
    """The same bits, structure and objects."""
    if isinstance(want, torch.Tensor):
        return isinstance(got, torch.Tensor) and got.dtype == want.dtype and torch.equal(got, want)
    if isinstance(want, list | tuple):
        return (
            type(got) is type(want)
            and len(got) == len(want)
            and all(same(a, b) for a, b in zip(got, want, strict=True))
        )
    if isinstance(want, dict):
        return (
            isinstance(got, dict) and got.keys() == want.keys() and all(same(got[k], want[k]) for k in want)
        )
    return got is want or (type(got) is type(want) and isinstance(want, int | float | str) and got == want)
