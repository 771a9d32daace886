"""The logits of a model's routers, handed out by its layers.

transformers collects them by hooks on the routers, a side effect that neither a checkpointed graph nor a
region can hold. Here a layer returns them beside its hidden states, out of its checkpoint, and puts them on a
list when it was called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from monograph.training.regions.layer import RegionLayer
from monograph.upstream.instance_class import put_before
from monograph.upstream.transformers_names import (
    GradientCheckpointingLayer,
    load_balancing_loss,
    router_recorder,
)


class RouterLogits:
    """What the layers of one model gave in one forward; None: nobody asks. share: of the loss, float32 []."""

    def __init__(self) -> None:
        self.collected: list[torch.Tensor] | None = None
        self.inside: torch.Tensor | None = None  # while a layer computes
        self.share = torch.ones(())


class TappedRouter(nn.Module):
    router_logits: RouterLogits
    router_index: int  # of the logits in what the router gives

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = super().forward(*args, **kwargs)
        self.router_logits.inside = given[self.router_index] if isinstance(given, tuple) else given
        return given


class TappedLayer(nn.Module):
    """Its forward gives (hidden states, logits); whoever calls it gets the hidden states."""

    router_logits: RouterLogits
    gives_beside = 1  # for regions

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = super().forward(*args, **kwargs)
        logits, self.router_logits.inside = self.router_logits.inside, None
        return hidden, logits

    def give_beside(self, given: list[torch.Tensor]) -> None:
        if self.router_logits.collected is not None:
            self.router_logits.collected.append(given[0])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden, *given = super().__call__(*args, **kwargs)
        self.give_beside(given)
        return hidden


def tap_routers(causal: Any) -> RouterLogits:
    """Makes the layers of a causal language model hand out the logits of their routers, in place."""
    if (known := vars(causal).get("router_logits")) is not None:
        return known
    name = type(causal).__name__
    recorder = router_recorder(causal.base_model)
    wanted = ("router_aux_loss_coef", "num_experts", "num_experts_per_tok")
    missing = [attribute for attribute in wanted if not hasattr(causal, attribute)]
    if recorder is None or load_balancing_loss(causal) is None or missing:
        raise ValueError(
            f"output_router_logits is true, but {name} has no loss of its router; wanted it false"
        )
    layers: dict[Any, Any] = {}
    for path, layer in causal.named_modules():
        if isinstance(layer, GradientCheckpointingLayer):
            routers = [m for m in layer.modules() if isinstance(m, recorder.target_class)]
            if len(routers) > 1 or isinstance(layer, RegionLayer):
                why = f"has {len(routers)} routers, wanted 1" if len(routers) > 1 else "is a region already"
                raise ValueError(f"output_router_logits is true, but {path} {why}")
            if routers:
                layers[layer] = routers[0]
    taps = RouterLogits()
    for layer, router in layers.items():
        put_before(TappedLayer, layer)
        put_before(TappedRouter, router)
        layer.router_logits = router.router_logits = taps
        router.router_index = recorder.index
    causal.router_logits = taps
    return taps


def router_loss(causal: Any, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """What transformers adds to the loss for the forward that was, times `share`."""
    taps: RouterLogits = causal.router_logits
    logits, taps.collected = tuple(taps.collected or ()), None
    if attention_mask is None:  # transformers counts with bincount then, whose size a graph does not know
        attention_mask = torch.ones(logits[0].shape[0], device=logits[0].device)
    found = load_balancing_loss(causal)(
        logits, causal.num_experts, causal.num_experts_per_tok, attention_mask
    )
    return causal.router_aux_loss_coef * found * taps.share
