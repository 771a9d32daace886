"""The head of a transformers model on our `linear`, where no gradient is asked for: generation, evaluation.

torch's product gives a row other last bits in another batch. Ours does not, and it is the product inside
`linear_log_probs`: the logits that a token is drawn from are those that a trainer scores it with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from monograph.hf.transformers.module_probe import KERNEL_TYPES, lies_where, runs_here
from monograph.ops.layout import plain_layout
from monograph.ops.linear import linear
from monograph.upstream.instance_class import put_before


class FusedHead(nn.Module):
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        plain = type(self.weight) in (nn.Parameter, torch.Tensor)  # not sharded by fully_shard
        ours = plain and runs_here("linear", input, self.weight)
        if not ours or torch.is_grad_enabled() or _cast(input):
            return super().forward(input)
        return linear(input, self.weight.contiguous(), [], plain_layout(self.weight.shape), self.bias)


def _cast(input: torch.Tensor) -> bool:
    """Whether autocast would bring the input to another dtype than the weight has."""
    where = input.device.type
    return torch.is_autocast_enabled(where) and torch.get_autocast_dtype(where) != input.dtype


def take_head(model: Any) -> bool:
    """Whether the head of the model is one of ours now. A QuantLinear computes so by itself."""
    head: Any = model.get_output_embeddings()
    if isinstance(head, FusedHead):
        return True
    known = (
        type(head) is nn.Linear
        and "forward" not in head.__dict__
        and lies_where("linear", head)
        and head.weight.dtype in KERNEL_TYPES
    )
    if known:
        put_before(FusedHead, head)
    return known
