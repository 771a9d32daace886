"""monograph::adamw: clipping by the global norm and one AdamW step over all parameters, one node in a graph.

`torch.optim` itself breaks a graph, and the same update traced parameter by parameter costs a minute of
compilation for 448 matrices. On the CPU the arithmetic is `adamw_update`, whose formulas stand in
core/monograph/kernels/adamw/adamw.h; other devices compute them by torch's operators.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import inf, isnan

import torch

from monograph.ops import library  # noqa: F401  (creates the namespace)
from monograph.ops.argument_checks import check_tensors, dtype_name

torch.library.define(
    "monograph::adamw",
    "(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] exp_avg, Tensor(c!)[] exp_avg_sq, "
    "Tensor(d!) steps, Tensor learning_rate, float beta1, float beta2, float eps, float[] weight_decay, "
    "float max_norm) -> Tensor",
)

# What the kernel reads as a gradient; others become float32 first.
_OWN = (torch.float32, torch.bfloat16, torch.float16)


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
    op: str,
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    exp_avg: list[torch.Tensor],
    exp_avg_sq: list[torch.Tensor],
    steps: torch.Tensor,
    learning_rate: torch.Tensor,
) -> None:
    """Ordinary tensors on one device. The fake asks too: torch runs it for any mixture with meta."""
    check_tensors(
        op,
        parameters=parameters,
        gradients=gradients,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        steps=steps,
        learning_rate=learning_rate,
    )


def _check_parameters(
    op: str,
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    exp_avg: list[torch.Tensor],
    exp_avg_sq: list[torch.Tensor],
    weight_decay: list[float],
) -> None:
    """All of a parameter's tensors have its shape."""
    lists = {"gradients": gradients, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    counts = {name: len(given) for name, given in lists.items()} | {"weight_decay": len(weight_decay)}
    for name, count in counts.items():
        if count != len(parameters) or count == 0:
            raise ValueError(
                f"{op}: {name} has {count} entries, parameters has {len(parameters)}, wanted one each"
            )
    for i, p in enumerate(parameters):
        if p.layout is not torch.strided or p.dtype != torch.float32:
            raise ValueError(f"{op}: parameters[{i}] is {dtype_name(p.dtype)} {p.layout}, wanted float32")
        for name, given in lists.items():
            t = given[i]
            same = t.shape == p.shape and t.layout is torch.strided and t.device == p.device
            if not same or (t.dtype != torch.float32 if name != "gradients" else not t.is_floating_point()):
                raise ValueError(
                    f"{op}: {name}[{i}] is {dtype_name(t.dtype)} {list(t.shape)} on {t.device}, "
                    f"wanted float32 {list(p.shape)} on {p.device} as the parameter"
                )
        # The kernel walks memory in order, so all must lie in it in the same way, without overlap.
        strides = p.stride()
        if not (p.is_contiguous() and exp_avg[i].stride() == strides and exp_avg_sq[i].stride() == strides):
            raise ValueError(f"{op}: parameters[{i}] or its moments are not contiguous, wanted contiguous")


def _check_apart(op: str, written: list[torch.Tensor]) -> None:
    """No two of the tensors that are written may share bytes: one would be updated twice."""
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in written if t.numel())
    for (_, end), (begin, _) in itertools.pairwise(spans):
        if begin < end:
            raise ValueError(f"{op}: parameters, moments and steps share memory, wanted tensors of their own")


def _check_numbers(
    op: str, steps: torch.Tensor, learning_rate: torch.Tensor, parameters: int, numbers: tuple[float, ...]
) -> None:
    for name, t, shapes in (("steps", steps, ([], [parameters])), ("learning_rate", learning_rate, ([],))):
        if t.dtype != torch.float32 or list(t.shape) not in shapes or t.layout is not torch.strided:
            wanted = " or ".join(map(str, shapes))
            raise ValueError(
                f"{op}: {name} is {dtype_name(t.dtype)} {list(t.shape)}, wanted float32 {wanted}"
            )
    if not steps.is_contiguous():
        raise ValueError(f"{op}: steps has strides {steps.stride()}, wanted contiguous: each is counted")
    beta1, beta2, eps, max_norm, *decay = numbers
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1 and 0 <= eps < inf and all(0 <= d < inf for d in decay)):
        raise ValueError(
            f"{op}: beta1={beta1}, beta2={beta2}, eps={eps}, weight_decay={decay}; wanted betas from 0 to "
            "below 1 and the others finite and not negative"
        )
    if isnan(max_norm):
        raise ValueError(f"{op}: max_norm is {max_norm}, wanted a number; 0 or less clips nothing")


def _check(
    op: str,
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    exp_avg: list[torch.Tensor],
    exp_avg_sq: list[torch.Tensor],
    steps: torch.Tensor,
    learning_rate: torch.Tensor,
    weight_decay: list[float],
    numbers: tuple[float, float, float, float],
) -> None:
    _check_devices(op, parameters, gradients, exp_avg, exp_avg_sq, steps, learning_rate)
    _check_parameters(op, parameters, gradients, exp_avg, exp_avg_sq, weight_decay)
    _check_apart(op, [*parameters, *exp_avg, *exp_avg_sq, steps])
    _check_numbers(op, steps, learning_rate, len(parameters), (*numbers, *weight_decay))


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
    tensors = (parameters, gradients, exp_avg, exp_avg_sq, steps, learning_rate)
    _check("adamw", *tensors, weight_decay, (beta1, beta2, eps, max_norm))
    gradients = [(g if g.dtype in _OWN else g.to(torch.float32)).contiguous() for g in gradients]
    lists = (parameters, gradients, exp_avg, exp_avg_sq)
    numbers = (beta1, beta2, eps, weight_decay, max_norm)
    with torch.no_grad():
        norm = torch.ops.monograph.adamw_update(*lists, steps, learning_rate, *numbers)
    # The kernel writes through pointers: a graph that saved one of these must notice.
    torch.autograd.graph.increment_version([*parameters, *exp_avg, *exp_avg_sq, steps])
    return norm


@torch.library.impl("monograph::adamw_update", "CompositeExplicitAutograd")
def _adamw_update(
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
    """The kernel's formulas for other devices; nothing is read back to the host. torch brings sparse and
    quantised tensors here too, so it checks for itself."""
    tensors = (parameters, gradients, exp_avg, exp_avg_sq, steps, learning_rate)
    _check("adamw_update", *tensors, weight_decay, (beta1, beta2, eps, max_norm))
    squares = [torch.linalg.vector_norm(g, dtype=torch.float64).square() for g in gradients]
    norm = torch.stack(squares).sum().sqrt().float()
    finite = norm.isfinite()
    clip = (max_norm / norm.double()).clamp_max(1.0).float() if max_norm > 0 else torch.ones_like(norm)
    steps += finite
    counts = steps.double()
    step_sizes = (learning_rate.double() / (1 - beta1**counts)).float().expand(len(parameters))
    inverse_roots = (1 / (1 - beta2**counts).sqrt()).float().expand(len(parameters))
    for i, decay in enumerate(weight_decay):
        p, m, v = parameters[i], exp_avg[i], exp_avg_sq[i]
        g = gradients[i].float() * clip
        next_m = m + (g - m) * (1 - beta1)
        next_v = v * beta2 + (g * (1 - beta2)) * g
        kept = p - p * (learning_rate.double() * decay).float() if decay else p
        moved = kept - (next_m * step_sizes[i]) / (next_v.sqrt() * inverse_roots[i] + eps)
        for into, value in ((m, next_m), (v, next_v), (p, moved)):
            into.copy_(torch.where(finite, value, into))
    return norm


@torch.library.register_fake("monograph::adamw")
def _(parameters, gradients, exp_avg, exp_avg_sq, steps, learning_rate, *_):  # type: ignore[no-untyped-def]
    _check_devices("adamw", parameters, gradients, exp_avg, exp_avg_sq, steps, learning_rate)
    return steps.new_empty(())


@torch.library.register_fake("monograph::adamw_update")
def _(parameters, gradients, exp_avg, exp_avg_sq, steps, learning_rate, *_):  # type: ignore[no-untyped-def]
    _check_devices("adamw_update", parameters, gradients, exp_avg, exp_avg_sq, steps, learning_rate)
    return steps.new_empty(())
