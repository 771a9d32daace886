"""monograph::adamw: clipping by the global norm and one AdamW step over all parameters, one node in a graph.

The arithmetic is torch's fused kernel; `torch.optim` itself breaks a graph, and the same update traced
parameter by parameter costs a minute of compilation for 448 matrices. No C++ of ours stands behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from monograph import _library  # noqa: F401  (creates the namespace)
from monograph.integrations.torch.private_names import foreach_norm, fused_adamw

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
    """Updates parameters, moments and `steps` (float32 []) in place; gives the norm before clipping.

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
    with torch.no_grad():
        # The kernel writes the clipped gradients back, so it gets copies.
        gradients = [g.to(torch.float32, copy=True) for g in gradients]
        norm = torch.linalg.vector_norm(torch.stack(foreach_norm(gradients)))
        skip = (~norm.isfinite()).float()
        divisor = (norm / max_norm).clamp_min(1.0) if max_norm > 0 else torch.ones_like(norm)
        steps += 1 - skip
        for decay in sorted(set(weight_decay)):
            members = [i for i, own in enumerate(weight_decay) if own == decay]
            fused_adamw(
                [parameters[i] for i in members],
                [gradients[i] for i in members],
                [exp_avg[i] for i in members],
                [exp_avg_sq[i] for i in members],
                [],
                [steps] * len(members),
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
def _(parameters, gradients, exp_avg, exp_avg_sq, steps, *_):  # type: ignore[no-untyped-def]
    return steps.new_empty(())
