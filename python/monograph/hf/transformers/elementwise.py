"""The parts of a transformers model that compute with our elementwise operators, instance by instance.

No class changes: a module that is taken over gets a subclass of its class with the same name; names,
parameters, hooks, files, copies and pickles stay as they are. Which variant a module is, it shows itself: its
own forward runs on drawn numbers and must give what the operator gives, in two dtypes. Left alone is what
fits no variant, has a forward of its own already, or is hooked where the operator would pass by.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from monograph.hf.transformers.fused_attention import FusedAttention, take_attention
from monograph.hf.transformers.fused_layer import FusedLayer, take_layer
from monograph.hf.transformers.fused_mlp import FusedMlp, take_mlp
from monograph.hf.transformers.fused_norm import FusedNorm, take_norm
from monograph.hf.transformers.fused_rotary import FusedLayerRotary, FusedRotary, take_rotary
from monograph.hf.transformers.fused_router import FusedRouter, take_router


class Taken(NamedTuple):
    """How many modules of each kind run on our operators."""

    norms: int
    mlps: int
    attentions: int
    layers: int
    rotaries: int
    routers: int

    def __str__(self) -> str:
        return (
            f"{self.norms} norms, {self.mlps} gated MLPs, the positions of {self.attentions} attentions, "
            f"a residual sum of {self.layers} layers, {self.rotaries} tables of angles, "
            f"{self.routers} routers"
        )


_KINDS = (
    (FusedNorm, take_norm),
    (FusedMlp, take_mlp),
    (FusedAttention, take_attention),  # has norms in it
    (FusedLayer, take_layer),  # likewise
    ((FusedRotary, FusedLayerRotary), take_rotary),
    (FusedRouter, take_router),
)


def take_over(model: nn.Module) -> Taken:
    """Called again, it counts them again."""
    return Taken(
        *(
            sum(isinstance(module, kind) or take(module) for module in list(model.modules()))
            for kind, take in _KINDS
        )
    )
