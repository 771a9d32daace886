"""transformers' experts: what a layer computes, and `experts_implementation="monograph"`.

A layer says by attributes how its parameters lie (`is_transposed`, `has_bias` ...). What it computes between
its two products is found by trying: its own gate is compared with every activation of the operator
on numbers beyond its limits. What matches none is refused by name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from monograph.nn.packed_experts import DOWN, ExpertsKind, PackedExperts, run_experts
from monograph.ops.experts import Activation
from monograph.ops.experts_activation import activate
from monograph.ops.layout import plain_layout
from monograph.upstream.transformers_names import ALL_EXPERTS_FUNCTIONS, apply_gate

NAME = "monograph"
_MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")  # of `use_experts_implementation`
_ROWS, _COLUMNS = 64, 16
# Whether a graph can call a function with a module while it is traced.
_TRACED_WITH_MODULES = torch.__version__ >= "2.12"


def is_experts(module: nn.Module) -> bool:
    """Whether transformers would call the interface of experts for it."""
    return all(hasattr(module, name) for name in (*_MARKS, DOWN))


def _number(module: nn.Module, *names: str) -> float | None:
    found = [getattr(module, name) for name in names if isinstance(getattr(module, name, None), (int, float))]
    return float(found[0]) if found else None


def _parts_of_kind(module: Any) -> tuple[Any, float | None, float | None]:
    """What may be changed on a layer, and changes what it computes: its activation, alpha and limit."""
    alpha, limit = _number(module, "alpha", "swiglu_alpha"), _number(module, "limit", "swiglu_limit")
    return getattr(module, "act_fn", None), alpha, limit


def _candidates(module: Any) -> list[ExpertsKind]:
    _, alpha, limit = _parts_of_kind(module)
    base = ExpertsKind(Activation.SILU, transposed=module.is_transposed, bias=module.has_bias)
    if not module.has_gate:
        return [replace(base, activation=kind) for kind in Activation if not kind.gated]
    kinds = [base, replace(base, activation=Activation.GELU_TANH)]
    if limit is not None:
        kinds.append(replace(base, activation=Activation.CLAMPED_SILU, limit=limit))
    if limit is not None and alpha is not None:
        kinds.append(replace(base, activation=Activation.GPT_OSS, limit=limit, alpha=alpha))
    return [replace(kind, interleaved=interleaved) for kind in kinds for interleaved in (False, True)]


def experts_kind(module: Any) -> ExpertsKind:
    """What a layer computes; a ValueError names what it has that the operator has not."""
    name = type(module).__name__
    if not is_experts(module):
        raise ValueError(f"{name} does not call transformers' interface of experts, wanted one that does")
    if getattr(module, "has_post_expert_norm", False):
        raise ValueError(f"{name} has a norm behind each expert, wanted none")
    act_fn, _, limit = _parts_of_kind(module)
    with torch.no_grad(), torch.device("cpu"):  # transformers makes models on the meta device
        generator = torch.Generator().manual_seed(1)
        sample = torch.randn(_ROWS, _COLUMNS, generator=generator, dtype=torch.float64)
        sample = sample * max(2.0, 1.5 * (limit or 0.0))
        want = apply_gate(module, sample) if module.has_gate else act_fn(sample)
        for kind in _candidates(module):
            got = activate(sample, kind)
            if got.shape == want.shape and torch.allclose(got, want, rtol=1e-5, atol=1e-6):
                return kind
    activation = type(act_fn).__name__
    known = ", ".join(kind.name.lower() for kind in Activation)
    raise ValueError(f"{name} has a gate of its own ({activation}), which is none of {known}")


def has_known_experts(model: nn.Module) -> bool:
    """Whether a model has dense experts, all of them of a known kind."""
    try:
        kinds = [
            experts_kind(m) for m in model.modules() if is_experts(m) and not isinstance(m, PackedExperts)
        ]
    except ValueError:
        return False
    return bool(kinds)


# A graph tries the gate while it is traced, and reads what was found as any attribute.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _learn_kind(module: Any) -> bool:
    parts = _parts_of_kind(module)
    if module.__dict__.get("experts_kind_of") != parts:
        module.experts_kind = experts_kind(module)
        module.__dict__["experts_kind_of"] = parts
    return True


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, **low: Any
) -> torch.Tensor:
    """What `experts_implementation="monograph"` calls for dense experts, frozen or trained."""
    if _TRACED_WITH_MODULES or not torch.compiler.is_compiling():
        _learn_kind(self)
    elif not hasattr(self, "experts_kind"):
        raise RuntimeError(
            f"{NAME} experts in a graph of torch 2.11: call the model once before compiling it"
        )
    kind: ExpertsKind = self.experts_kind
    first, second = (getattr(self, name).contiguous() for name in kind.names)
    biases = tuple(getattr(self, f"{name}_bias") for name in kind.names) if kind.bias else (None, None)
    return run_experts(
        kind,
        ((first, [], plain_layout(first.shape)), (second, [], plain_layout(second.shape))),
        (biases[0], biases[1]),
        hidden_states,
        top_k_index,
        top_k_weights,
        low.get("lora") or {},
        kind.transposed,
    )


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
