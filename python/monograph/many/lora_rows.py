"""LoraRows: a LoRA layer whose adapters have rows of their own of one batch.

`rows.seed` says at each call whose rows are whose and what each draws from: int64 [2 N + 1], the starts of N
ranges (`monograph.ops.row_ranges`) and N seeds. It stands where a dropout has its seed, so that regions take
it as an input. Every product takes x itself: a node between would change the order in which autograd adds,
and with it the bits that an adapter has alone.
"""

from __future__ import annotations

from typing import Any

import torch

from monograph.hf.peft.lora_linear import LoraLinear
from monograph.nn.quant_linear import QuantLinear
from monograph.ops.layout import plain_layout
from monograph.ops.linear_many import linear_many
from monograph.ops.low_rank_many import low_rank_many
from monograph.ops.seeded_dropout import SeededDropout
from monograph.ops.seeded_dropout_many import seeded_dropout_many


class RowPlan(SeededDropout):
    """Holds the plan, and drops nothing itself."""

    def __init__(self, plan: torch.Tensor, stream: int) -> None:
        super().__init__(0.5, plan, stream)


class LoraRows(LoraLinear):
    """In the place of a fused LoraLinear; `adapters`: the names of all ranges."""

    adapters: tuple[str, ...]
    rows: RowPlan

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        base, count = self.base_layer, len(self.adapters)
        starts, seeds = self.rows.seed[: count + 1], self.rows.seed[count + 1 :]
        if isinstance(base, QuantLinear):
            packed, stored_x = base.operands, base.permuted(x)
        else:
            packed, stored_x = (base.weight, [], plain_layout(base.weight.shape)), x
        no_a, no_b = x.new_empty(0, base.in_features), x.new_empty(base.out_features, 0)
        a, b = [no_a] * count, [no_b] * count
        for i, name in enumerate(self.adapters):
            if name in self.lora_A:
                a[i], b[i] = self.factors([name], x.dtype)
        width = max(factor.shape[0] for factor in a)
        dropping = [i for i, name in enumerate(self.adapters) if name in self.lora_A and self.drops(name)]
        plain = [no_a if i in dropping else factor for i, factor in enumerate(a)]
        parts = []
        if any(factor.shape[0] for factor in plain):
            with torch.no_grad():
                parts.append(low_rank_many(x, plain, starts, width))
        if dropping:
            parts.append(self._dropped(x, a, starts, seeds, dropping, width))
        u = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        stored_a = [base.permuted(f) for f in plain] if isinstance(base, QuantLinear) else plain
        return linear_many(
            stored_x, *packed, starts, u, b, stored_a, self._biases(x.dtype), self._gains(x.device)
        )

    def _dropped(
        self,
        x: torch.Tensor,
        a: list[torch.Tensor],
        starts: torch.Tensor,
        seeds: torch.Tensor,
        dropping: list[int],
        width: int,
    ) -> torch.Tensor:
        """u of the adapters with dropout, each under its own mask."""
        layers: list[Any] = [self.lora_dropout[self.adapters[i]] for i in dropping]
        streams, shares = [layer.stream for layer in layers], [layer.p for layer in layers]
        dropped = seeded_dropout_many(x, starts, seeds, dropping, streams, shares)
        own = [factor if i in dropping else a[i].new_empty(0, x.shape[-1]) for i, factor in enumerate(a)]
        return low_rank_many(dropped, own, starts, width)

    def _biases(self, dtype: torch.dtype) -> list[torch.Tensor]:
        own = [[name] if name in self.lora_A else [] for name in self.adapters]
        found = [self.total_bias(names, dtype) for names in own]
        if all(bias is None for bias in found):
            return []
        return [torch.empty(0, dtype=dtype) if bias is None else bias for bias in found]

    def _gains(self, device: torch.device) -> list[torch.Tensor]:
        """The gain of each row of W for adapters with DoRA."""
        if not self.lora_magnitude_vector:
            return []
        none = torch.empty(0, device=device)
        return [
            self.lora_magnitude_vector[name].weight.float() / self.dora_norm(name)
            if name in self.lora_magnitude_vector
            else none
            for name in self.adapters
        ]
