"""Gated MLPs of a transformers model on silu_mul and gelu_mul."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from monograph.hf.transformers.module_probe import (
    ROWS,
    Given,
    agree,
    draw,
    lies_where,
    probe_of,
    runs_here,
    tried,
)
from monograph.ops.gated_activation import gelu_mul, silu_mul
from monograph.upstream.instance_class import put_before
from monograph.upstream.torch_names import (
    buffers_of,
    has_any_global_hook,
    hooks,
    parameters_of,
)

_GATED: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    silu_mul,
    lambda gate, up: gelu_mul(gate, up, tanh=True),
    lambda gate, up: gelu_mul(gate, up, tanh=False),
)
_OPERATORS = ("silu_mul", "gelu_mul", "gelu_mul")


class FusedMlp(nn.Module):
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module
    monograph_activation: int  # of _GATED
    monograph_act_fn: str  # what act_fn was then: another one is called

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        here = runs_here(_OPERATORS[self.monograph_activation], gate, up)
        if not here or self.monograph_act_is_other():
            return self.down_proj(self.act_fn(gate) * up)
        return self.down_proj(_GATED[self.monograph_activation](gate, up))

    # A graph decides it once, without a guard per module: torch keeps to hooks of tracing time, too. A
    # method, because torch 2.11 takes no module as an argument of such a function.
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def monograph_act_is_other(self) -> bool:
        function: Any = self.act_fn
        if not isinstance(function, nn.Module) or any(hooks(function)) or has_any_global_hook():
            return True
        return repr(function) != self.monograph_act_fn


def take_mlp(module: Any) -> bool:
    known = (
        {name for name, _ in module.named_children()} == {"gate_proj", "up_proj", "down_proj", "act_fn"}
        and "forward" not in module.__dict__
        and not parameters_of(module)
        and not buffers_of(module)
        and not any(hooks(module.act_fn))
        and not list(module.act_fn.parameters())
        and len(inspect.signature(type(module).forward).parameters) == 2
    )
    if not known:
        return False
    for number, function in enumerate(_GATED):
        there = lies_where(_OPERATORS[number], module)
        if there and all(_is_gated(module, function, train) for train in (False, True)):
            module.monograph_activation, module.monograph_act_fn = number, repr(module.act_fn)
            put_before(FusedMlp, module)
            return True
    return False


def _is_gated(module: Any, function: Callable[..., torch.Tensor], train: bool) -> bool:
    for dtype in (torch.bfloat16, torch.float32):
        x, gate, up, y = ((2 * draw(seed, ROWS, 64)).to(dtype) for seed in range(4))
        gate[::4] *= 8  # where a variant may clamp
        parts = {"gate_proj": Given(gate), "up_proj": Given(up), "down_proj": Given(y)}
        probe = probe_of(module, {}, {**parts, "act_fn": module.act_fn})
        probe.training = train
        result = tried(type(module).forward, probe, x)
        asked = {name: [args for args, _ in part.asked] for name, part in parts.items()}
        plain = result is y and all(len(each) == 1 and len(each[0]) == 1 for each in asked.values())
        if not plain or any(asked[name][0][0] is not x for name in ("gate_proj", "up_proj")):
            return False
        # 1 + tanh and 1 + erf lose their digits below 0.
        if not agree(function(gate, up), asked["down_proj"][0][0], 2**-22 * (gate * up).abs().float()):
            return False
    return True
