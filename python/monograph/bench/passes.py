"""A case of an operator as work to be timed: its forward, or forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import torch

from monograph.bench.rounds import Work

Function = Callable[..., tuple[torch.Tensor, ...]]


def random_bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def passes(leaves: list[torch.Tensor], functions: dict[str, Function], backward: bool) -> dict[str, Work]:
    """Each function on leaves of its own, run once: what compiles has compiled."""
    above = [random_bf16(*t.shape) for t in functions["ours"](*leaves)]

    def work(function: Function) -> Work:
        own = [t.clone().requires_grad_(backward) for t in leaves]

        def run() -> object:
            outs = function(*own)
            return torch.autograd.grad(outs, own, above) if backward else outs

        run()
        return run

    return {name: work(function) for name, function in functions.items()}
