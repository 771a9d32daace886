"""Norms and gated MLPs of a transformers model on rms_norm, silu_mul and gelu_mul, instance by instance.

No class changes: a module that is taken over gets a subclass of its class with the same name; names,
parameters, hooks, files, copies and pickles stay as they are. Which variant a module is, it shows itself: its
own forward runs on drawn numbers and must give what the operator gives, in two dtypes and with weights of two
dtypes. Left alone is what fits no variant, has a forward of its own already, or is hooked where the operator
would pass by.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from monograph.integrations.torch.private_names import buffers_of, hooks, parameters_of
from monograph.ops.gated_activation import gelu_mul, silu_mul
from monograph.ops.rms_norm import rms_norm

_KERNEL_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_ROWS = 16
# (one_plus_weight, round_before_weight)
_NORMS = ((False, True), (True, False), (False, False), (True, True))
_GATED: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    silu_mul,
    lambda gate, up: gelu_mul(gate, up, tanh=True),
    lambda gate, up: gelu_mul(gate, up, tanh=False),
)


def take_over(model: nn.Module) -> tuple[int, int]:
    """How many norms and how many gated MLPs now run on our operators; called again, it counts them again."""
    norms = mlps = 0
    for module in model.modules():
        if isinstance(module, FusedNorm) or _take_norm(module):
            norms += 1
        elif isinstance(module, FusedMlp) or _take_mlp(module):
            mlps += 1
    return norms, mlps


class _Fused(nn.Module):
    """Before the class of a module that is taken over."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        ours, own = type(self).__bases__
        return _made, (ours, own), self.__dict__


def _made(ours: type[_Fused], own: type[nn.Module]) -> Any:
    cls = _subclass(ours, own)
    return cls.__new__(cls)


_SUBCLASSES: dict[tuple[type, type], type[nn.Module]] = {}


def _subclass(ours: type[_Fused], own: type[nn.Module]) -> type[nn.Module]:
    """One for all modules of a class, so that regions see layers of one kind."""
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    if (ours, own) not in _SUBCLASSES:
        _SUBCLASSES[ours, own] = type(own.__name__, (ours, own), names)
    return _SUBCLASSES[ours, own]


def _runs_here(*tensors: torch.Tensor) -> bool:
    """On a CPU, in one dtype that the kernels have."""
    first = tensors[0].dtype
    return first in _KERNEL_TYPES and all(t.device.type == "cpu" and t.dtype == first for t in tensors)


class FusedNorm(_Fused):
    weight: torch.Tensor
    monograph_norm: tuple[bool, bool]  # of _NORMS

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not _runs_here(hidden_states) or self.weight.dtype not in _KERNEL_TYPES:
            return super().forward(hidden_states)
        one_plus, rounded = self.monograph_norm
        return rms_norm(
            hidden_states,
            self.weight,
            eps=_epsilon(self),
            one_plus_weight=one_plus,
            round_before_weight=rounded,
        )[0]


class FusedMlp(_Fused):
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module
    monograph_activation: int  # of _GATED
    monograph_act_fn: str  # what act_fn was then: another one is called

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if not _runs_here(gate, up) or _is_other(self.act_fn, self.monograph_act_fn):
            return self.down_proj(self.act_fn(gate) * up)
        return self.down_proj(_GATED[self.monograph_activation](gate, up))


# A graph decides it once, without a guard per module: torch keeps to hooks of tracing time, too.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_other(module: nn.Module, known: str) -> bool:
    return any(hooks(module)) or repr(module) != known


def _epsilon(norm: Any) -> Any:
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else getattr(norm, "eps", None)


def _draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _stand_in(
    module: nn.Module, parameters: dict[str, torch.Tensor], children: dict[str, nn.Module]
) -> nn.Module:
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


def _agree(got: torch.Tensor, want: Any, slack: torch.Tensor) -> bool:
    """The same values but for the order of sums: 99 % of the bits of a 16-bit type, a few units of float32.

    `slack` is by how much torch's own float32 may be off; where it matters 16-bit types are not compared.
    """
    if not isinstance(want, torch.Tensor) or want.dtype != got.dtype or want.shape != got.shape:
        return False
    if got.dtype == torch.float32:
        return bool(torch.all((got - want).abs() <= 2**-19 * want.abs() + slack))
    clear = slack <= 2**-18 * want.abs()
    return bool(clear.any()) and float((got != want)[clear].double().mean()) <= 0.01


def _tried(module: nn.Module, probe: nn.Module, x: torch.Tensor) -> Any:
    """What the class computes; None where it refuses our rows, as no variant that is known does."""
    try:
        return type(module).forward(probe, x)
    except Exception:
        return None


def _take_norm(module: Any) -> bool:
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
        and weight.dtype in _KERNEL_TYPES
        and weight.device.type == "cpu"
        and len(inspect.signature(type(module).forward).parameters) == 2
    )
    if not known:
        return False
    for kind in _NORMS:
        if _is_norm(module, weight.numel(), *kind):
            module.monograph_norm = kind
            module.__class__ = _subclass(FusedNorm, type(module))
            return True
    return False


def _is_norm(module: nn.Module, cols: int, one_plus: bool, rounded: bool) -> bool:
    options = {"eps": _epsilon(module), "one_plus_weight": one_plus, "round_before_weight": rounded}
    # Rows of usual size, and so small that eps counts.
    sizes = torch.tensor([1.0, 40.0, 3e-3, 1e-4]).repeat(_ROWS // 4)[:, None]
    for number, (dtype, weight_dtype) in enumerate(
        (x, w) for x in (torch.bfloat16, torch.float32) for w in (torch.bfloat16, torch.float32)
    ):
        x = (_draw(2 * number, _ROWS, cols) * sizes).to(dtype)
        weight = (0.4 + 0.5 * _draw(2 * number + 1, cols)).to(weight_dtype)
        with torch.no_grad():
            want = _tried(module, _stand_in(module, {"weight": weight}, {}), x)
        got = rms_norm(x, weight, **options)[0]
        if not _agree(got, want, torch.zeros_like(got)):
            return False
    return True


class _Given(nn.Module):
    """Answers with one tensor and remembers what it was asked."""

    def __init__(self, answer: torch.Tensor) -> None:
        super().__init__()
        self.answer, self.asked = answer, []  # type: ignore[var-annotated]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.asked.append(x)
        return self.answer


def _take_mlp(module: Any) -> bool:
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
        if all(_is_gated(module, function, train) for train in (False, True)):
            module.monograph_activation, module.monograph_act_fn = number, repr(module.act_fn)
            module.__class__ = _subclass(FusedMlp, type(module))
            return True
    return False


def _is_gated(module: Any, function: Callable[..., torch.Tensor], train: bool) -> bool:
    for dtype in (torch.bfloat16, torch.float32):
        x, gate, up, y = ((2 * _draw(seed, _ROWS, 64)).to(dtype) for seed in range(4))
        gate[::4] *= 8  # where a variant may clamp
        parts = {"gate_proj": _Given(gate), "up_proj": _Given(up), "down_proj": _Given(y)}
        probe: Any = _stand_in(module, {}, {**parts, "act_fn": module.act_fn})
        probe.training = train
        with torch.no_grad():
            result = _tried(module, probe, x)
        plain = result is y and all(len(part.asked) == 1 for part in parts.values())
        if not plain or any(parts[name].asked[0] is not x for name in ("gate_proj", "up_proj")):
            return False
        # 1 + tanh and 1 + erf lose their digits below 0.
        if not _agree(function(gate, up), parts["down_proj"].asked[0], 2**-22 * (gate * up).abs().float()):
            return False
    return True
