"""monograph::adamw: clipping by the global norm and one AdamW step over all parameters, one node in a graph.

The arithmetic is torch's fused kernel; `torch.optim` itself breaks a graph, and the same update traced
parameter by parameter costs a minute of compilation for 448 matrices. No C++ of ours stands behind it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import inf, isnan

import torch

from monograph.ops import library  # noqa: F401  (creates the namespace)
from monograph.ops.argument_checks import check_tensors, dtype_name
from monograph.upstream.torch_names import fused_adamw

torch.library.define(
    "monograph::adamw",
    "(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] exp_avg, Tensor(c!)[] exp_avg_sq, "
    "Tensor(d!) steps, Tensor learning_rate, float beta1, float beta2, float eps, float[] weight_decay, "
    "float max_norm) -> Tensor",
)


def adamw(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    exp_avg: Sequence[torch.Tensor],
    exp_avg_sq: Sequence[torch.Tensor],
    steps: torch.Tensor,
    learning_rate: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: Sequence[float],
    max_norm: float,
) -> torch.Tensor:
    """Updates parameters, moments and `steps` (float32 [], or one for each parameter, [n]) in place; gives
    the norm before clipping.

    Parameters and moments are float32, one weight_decay a parameter; gradients of any float dtype are left as
    they are. max_norm <= 0 clips nothing. A norm that is not finite leaves everything unchanged, `steps` too.
    """
    return torch.ops.monograph.adamw(
        parameters,
        gradients,
        exp_avg,
        exp_avg_sq,
        steps,
        learning_rate,
        beta1,
        beta2,
        eps,
        weight_decay,
        max_norm,
    )


def _check_devices(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    exp_avg: list[torch.Tensor],
    exp_avg_sq: list[torch.Tensor],
    steps: torch.Tensor,
    learning_rate: torch.Tensor,
) -> None:
    """Ordinary tensors on one device. The fake asks too: torch runs it for any mixture with meta."""
    check_tensors(
        "adamw",
        parameters=parameters,
        gradients=gradients,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        steps=steps,
        learning_rate=learning_rate,
    )


def _check_parameters(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    exp_avg: list[torch.Tensor],
    exp_avg_sq: list[torch.Tensor],
    weight_decay: list[float],
) -> None:
    """torch's kernel trusts that all of a parameter's tensors have its shape, and writes by it."""
    lists = {"gradients": gradients, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    counts = {name: len(given) for name, given in lists.items()} | {"weight_decay": len(weight_decay)}
    for name, count in counts.items():
        if count != len(parameters) or count == 0:
            raise ValueError(
                f"adamw: {name} has {count} entries, parameters has {len(parameters)}, wanted one each"
            )
    for i, p in enumerate(parameters):
        if p.layout is not torch.strided or p.dtype != torch.float32:
            raise ValueError(f"adamw: parameters[{i}] is {dtype_name(p.dtype)} {p.layout}, wanted float32")
        for name, given in lists.items():
            t = given[i]
            same = t.shape == p.shape and t.layout is torch.strided and t.device == p.device
            if not same or (t.dtype != torch.float32 if name != "gradients" else not t.is_floating_point()):
                raise ValueError(
                    f"adamw: {name}[{i}] is {dtype_name(t.dtype)} {list(t.shape)} on {t.device}, "
                    f"wanted float32 {list(p.shape)} on {p.device} as the parameter"
                )
        # The kernel walks memory in order, so all must lie in it in the same way, without overlap.
        strides = p.stride()
        if not (p.is_contiguous() and exp_avg[i].stride() == strides and exp_avg_sq[i].stride() == strides):
            raise ValueError(f"adamw: parameters[{i}] or its moments are not contiguous, wanted contiguous")
    _check_apart([*parameters, *exp_avg, *exp_avg_sq])


def _check_apart(written: list[torch.Tensor]) -> None:
    """No two of the tensors that are written may share bytes: one would be updated twice."""
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in written if t.numel())
    for (_, end), (begin, _) in itertools.pairwise(spans):
        if begin < end:
            raise ValueError("adamw: parameters and moments share memory, wanted tensors of their own")


def _check_numbers(
    steps: torch.Tensor, learning_rate: torch.Tensor, parameters: int, numbers: tuple[float, ...]
) -> None:
    for name, t, shapes in (("steps", steps, ([], [parameters])), ("learning_rate", learning_rate, ([],))):
        if t.dtype != torch.float32 or list(t.shape) not in shapes or t.layout is not torch.strided:
            wanted = " or ".join(map(str, shapes))
            raise ValueError(
                f"adamw: {name} is {dtype_name(t.dtype)} {list(t.shape)}, wanted float32 {wanted}"
            )
    if not steps.is_contiguous():
        raise ValueError(f"adamw: steps has strides {steps.stride()}, wanted contiguous: each is counted")
    beta1, beta2, eps, max_norm, *decay = numbers
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1 and 0 <= eps < inf and all(0 <= d < inf for d in decay)):
        raise ValueError(
            f"adamw: beta1={beta1}, beta2={beta2}, eps={eps}, weight_decay={decay}; wanted betas from 0 to "
            "below 1 and the others finite and not negative"
        )
    if isnan(max_norm):
        raise ValueError(f"adamw: max_norm is {max_norm}, wanted a number; 0 or less clips nothing")


@torch.library.impl("monograph::adamw", "CompositeExplicitAutograd")
def _adamw(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    exp_avg: list[torch.Tensor],
    exp_avg_sq: list[torch.Tensor],
    steps: torch.Tensor,
    learning_rate: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: list[float],
    max_norm: float,
) -> torch.Tensor:
    _check_devices(parameters, gradients, exp_avg, exp_avg_sq, steps, learning_rate)
    _check_parameters(parameters, gradients, exp_avg, exp_avg_sq, weight_decay)
    _check_numbers(steps, learning_rate, len(parameters), (beta1, beta2, eps, max_norm, *weight_decay))
    with torch.no_grad():
        # The kernel writes the clipped gradients back, so it gets copies.
        gradients = [g.to(torch.float32, copy=True) for g in gradients]
        norm = torch.nn.utils.get_total_norm(gradients)
        skip = (~norm.isfinite()).float()
        divisor = (norm / max_norm).clamp_min(1.0) if max_norm > 0 else torch.ones_like(norm)
        steps += 1 - skip
        own_steps = list(steps) if steps.dim() else [steps] * len(parameters)
        for decay in sorted(set(weight_decay)):
            members = [i for i, own in enumerate(weight_decay) if own == decay]
            fused_adamw(
                [parameters[i] for i in members],
                [gradients[i] for i in members],
                [exp_avg[i] for i in members],
                [exp_avg_sq[i] for i in members],
                [],
                [own_steps[i] for i in members],
                lr=learning_rate,
                beta1=beta1,
                beta2=beta2,
                weight_decay=decay,
                eps=eps,
                amsgrad=False,
                maximize=False,
                grad_scale=divisor,
                found_inf=skip,
            )
    return norm


@torch.library.register_fake("monograph::adamw")
def _(parameters, gradients, exp_avg, exp_avg_sq, steps, learning_rate, *_):  # type: ignore[no-untyped-def]
    _check_devices(parameters, gradients, exp_avg, exp_avg_sq, steps, learning_rate)
    return steps.new_empty(())
