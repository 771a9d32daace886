"""RMS norms of a transformers model on rms_norm."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from monograph.hf.transformers.module_probe import (
    KERNEL_TYPES,
    ROWS,
    agree,
    draw,
    lies_where,
    probe_of,
    runs_here,
    tried,
)
from monograph.ops.rms_norm import rms_norm
from monograph.upstream.instance_class import put_before
from monograph.upstream.torch_names import (
    buffers_of,
    has_any_global_hook,
    hooks,
    parameters_of,
)

# (one_plus_weight, round_before_weight)
_KINDS = ((False, True), (True, False), (False, False), (True, True))


class FusedNorm(nn.Module):
    weight: torch.Tensor
    monograph_norm: tuple[bool, bool]  # of _KINDS

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not runs_here("rms_norm", hidden_states) or self.weight.dtype not in KERNEL_TYPES:
            return super().forward(hidden_states)
        return rms_norm(hidden_states, self.weight, **options_of(self))[0]

    # A graph decides it once, without a guard per module: torch keeps to hooks of tracing time, too. A
    # method, because torch 2.11 takes no module as an argument of such a function.
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def monograph_may_be_passed(self) -> bool:
        return not any(hooks(self)) and not has_any_global_hook() and "forward" not in self.__dict__


def options_of(norm: FusedNorm) -> dict[str, Any]:
    """Of `rms_norm` and `rotary`."""
    one_plus, rounded = norm.monograph_norm
    return {"eps": _epsilon(norm), "one_plus_weight": one_plus, "round_before_weight": rounded}


def may_be_passed(norm: nn.Module) -> bool:
    """Whether an operator that has the norm in it computes what a call of the module does."""
    return isinstance(norm, FusedNorm) and norm.monograph_may_be_passed()


def _epsilon(norm: Any) -> Any:
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else getattr(norm, "eps", None)


def take_norm(module: Any) -> bool:
    weight: Any = parameters_of(module).get("weight")
    known = (
        type(module).__name__.endswith("RMSNorm")
        and "forward" not in module.__dict__
        and list(parameters_of(module)) == ["weight"]
        and not buffers_of(module)
        and not list(module.children())
        and isinstance(_epsilon(module), float)
        and isinstance(weight, torch.Tensor)
        and weight.dim() == 1
        and weight.numel() > 0
        and weight.dtype in KERNEL_TYPES
        and not weight.is_meta
        and lies_where("rms_norm", module)
        and len(inspect.signature(type(module).forward).parameters) == 2
    )
    if not known:
        return False
    for kind in _KINDS:
        if _is_norm(module, weight.numel(), *kind):
            module.monograph_norm = kind
            put_before(FusedNorm, module)
            return True
    return False


def _is_norm(module: nn.Module, cols: int, one_plus: bool, rounded: bool) -> bool:
    options = {"eps": _epsilon(module), "one_plus_weight": one_plus, "round_before_weight": rounded}
    # Rows of usual size, and so small that eps counts.
    sizes = torch.tensor([1.0, 40.0, 3e-3, 1e-4]).repeat(ROWS // 4)[:, None]
    for number, (dtype, weight_dtype) in enumerate(
        (x, w) for x in (torch.bfloat16, torch.float32) for w in (torch.bfloat16, torch.float32)
    ):
        x = (draw(2 * number, ROWS, cols) * sizes).to(dtype)
        weight = (0.4 + 0.5 * draw(2 * number + 1, cols)).to(weight_dtype)
        want = tried(type(module).forward, probe_of(module, {"weight": weight}, {}), x)
        got = rms_norm(x, weight, **options)[0]
        if not agree(got, want, torch.zeros_like(got)):
            return False
    return True
