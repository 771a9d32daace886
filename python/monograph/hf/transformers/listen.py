"""The log-probabilities of tokens as a generator has them.

    with listen(model) as heard:
        ids = model.generate(input_ids=prompts, do_sample=True, top_k=0, ...)
    log_probs = heard.log_probs(ids[:, prompts.shape[1] :])

With a head that our operators read, the hidden states of each step go to `linear_log_probs`, whose product
and sums are those of a trainer on our head. Any other head is taken at its word: log_softmax of its logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from monograph.hf.transformers.fused_head import FusedHead
from monograph.hf.transformers.shared_rows import SharedRows
from monograph.nn.quant_linear import QuantLinear
from monograph.ops.linear_log_probs import linear_log_probs
from monograph.training.loss import head_operands, logits_map


class Heard:
    """What the head of a model was asked and has said, step by step."""

    def __init__(self, model: Any) -> None:
        self._head: Any = model.get_output_embeddings()
        self._softcap, self._scale = logits_map(model.config)
        self._ours = isinstance(self._head, FusedHead | QuantLinear)
        self._steps: list[torch.Tensor] = []

    def _hook(self, head: nn.Module, asked: tuple[Any, ...], said: torch.Tensor) -> None:
        self._steps.append((asked[0] if self._ours else said)[:, -1:].detach())

    def spread(self, rows: torch.Tensor) -> None:
        """The last step was of fewer rows than there are: `rows` says which of them each one is."""
        self._steps[-1] = self._steps[-1][rows]

    @torch.no_grad()
    def log_probs(self, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """Of the tokens drawn, [rows, steps], float32; in one pass over the head."""
        steps = torch.cat(self._steps, dim=1)[:, : tokens.shape[1]]
        scale = self._scale / temperature
        if self._ours:
            head = self._head
            bias = None if head.bias is None else head.bias.to(steps.dtype)
            return linear_log_probs(
                *head_operands(steps, head), tokens, bias, softcap=self._softcap, scale=scale
            ).log_probs
        logits = steps.float() * scale
        if self._softcap:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        return torch.log_softmax(logits, dim=-1).gather(-1, tokens[..., None])[..., 0]


@contextmanager
def listen(model: Any) -> Iterator[Heard]:
    """`model`: of transformers, or PEFT's around it."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    heard = Heard(model)
    hook = heard._head.register_forward_hook(heard._hook)
    try:
        with SharedRows.told_to(heard.spread):
            yield heard
    finally:
        hook.remove()
