"""TRL's head beside ours on one tiny model, and the fields that both return."""

from __future__ import annotations

from typing import Any

import torch
from trl.trainer.utils import add_fused_lm_head

from monograph.hf.trl import head as trl_head
from support.tiny_models import tiny_llama

FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def tiny(**change: Any) -> Any:
    return tiny_llama(vocab_size=131, num_hidden_layers=1, **change)


def batch(rows: int = 3, length: int = 17) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 131, (rows, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :5] = -100
    labels[1] = -100
    return {"input_ids": ids, "labels": labels}


def both(outputs: tuple[str, ...] = FIELDS, temperature: float = 1.0, **change: Any) -> list[Any]:
    """A model with TRL's head, and the same taken over."""
    models = []
    for ours in (False, True):
        model = tiny(**change)
        add_fused_lm_head(model, temperature=temperature, outputs=outputs)
        assert trl_head.take_over(model) is True if ours else True
        models.append(model)
    return models
