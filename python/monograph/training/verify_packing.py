"""A probe before a run on packed rows: does this model keep the documents of a row apart?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from monograph.packing import PackedCollator
from monograph.training.evaluating import evaluating

_NOT_FOR_THE_MODEL = ("labels", "num_items_in_batch", "use_cache")


def _packed(documents: Sequence[torch.Tensor], device: torch.device) -> dict[str, Any]:
    batch = PackedCollator(max_documents=2)([{"input_ids": document.cpu()} for document in documents])
    inputs = {name: value for name, value in batch.items() if name not in _NOT_FOR_THE_MODEL}
    return {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}


def _logits(model: Any, **inputs: Any) -> torch.Tensor:
    return model(**inputs, use_cache=False).logits[0]


@torch.no_grad()
def verify_packing(model: nn.Module, first: int = 5, second: int = 3) -> None:
    """Raises ValueError if a document of a packed row sees another.

    Runs the model four times on a few tokens, without dropout: two documents in a packed row, each alone, and
    the first in a packed row of its own, which shows what rounding does. The logits of both must be those
    they have alone, within 8 times that rounding and within two roundings of the model's dtype or 2^-16 of
    the largest logit.
    """
    causal: Any = model
    device = next(model.parameters()).device
    ids = torch.arange(first + second, device=device) % causal.config.get_text_config().vocab_size
    documents = ids.split([first, second])
    rows = [_packed(documents, device), _packed(documents[:1], device)]
    with evaluating(model):
        packed, single = (_logits(model, **row) for row in rows)
        alone = torch.cat([_logits(model, input_ids=document[None]) for document in documents])
    largest = alone.float().abs().max()
    if not bool(torch.isfinite(largest)):
        raise ValueError(f"verify_packing: {type(causal).__name__} gives logits of {largest}, wanted numbers")
    off = (packed.float() - alone.float()).abs().max()
    noise = (single.float() - alone[:first].float()).abs().max()
    rounding = max(2 * torch.finfo(alone.dtype).eps, 2.0**-16) * largest
    if not bool(off <= torch.maximum(8 * noise, rounding)):
        raise ValueError(
            f"packed rows on {type(causal).__name__}: a document sees another of its row. Logits are off by "
            f"{off:.3g} of {largest:.3g} from those of each document alone, of one document in a row by "
            f"{noise:.3g}. Wanted one document per row (sample_packing: false, PaddedCollator)"
        )
