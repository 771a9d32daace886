"""The scale of the loss in float16, by the rules of torch.amp.GradScaler, as tensors inside the graph.

float16 ends at 6e-8: gradients of a loss that is a mean over many tokens vanish. So the backward pass begins
with `scale` instead of 1, and the float32 gradient is divided by it. Too large a scale overflows; that step
changes nothing but the scale.
"""

from __future__ import annotations

import torch
from torch import nn

# GradScaler's own values.
INITIAL, GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000


def needs_scaling(model: nn.Module) -> bool:
    """Whether a gradient passes through float16."""
    return any(p.dtype == torch.float16 for p in model.parameters())


class LossScale:
    """scale: float32 []; good_steps: int32 [], steps since the scale changed. Both are all of its state."""

    def __init__(
        self,
        initial: float = INITIAL,
        growth_interval: int = GROWTH_INTERVAL,
        device: torch.device | None = None,
    ) -> None:
        self.scale = torch.full((), initial, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self.growth_interval = growth_interval

    def unscaled(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * self.scale.double().reciprocal().float()

    @torch.no_grad()
    def update(self, finite: torch.Tensor) -> None:
        """Halves after a step that was not finite, doubles after `growth_interval` in a row that were."""
        good = torch.where(finite, self.good_steps + 1, 0)
        grows = good == self.growth_interval
        larger = self.scale * GROWTH
        grown = torch.where(grows & larger.isfinite(), larger, self.scale)
        self.scale.copy_(torch.where(finite, grown, self.scale * BACKOFF))
        self.good_steps.copy_(torch.where(grows, 0, good))

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"loss_scale": self.scale.clone(), "loss_scale_good_steps": self.good_steps.clone()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.scale.copy_(state["loss_scale"])
        self.good_steps.copy_(state["loss_scale_good_steps"])
