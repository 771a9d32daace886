"""A probe before a run on packed rows: does this model keep the documents of a row apart?"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from monograph.packing import PackedCollator

_NOT_FOR_THE_MODEL = ("labels", "num_items_in_batch")


def _logits(model: Any, **inputs: Any) -> torch.Tensor:
    return model(**inputs, use_cache=False).logits[0]


@torch.no_grad()
def verify_packing(model: nn.Module, first: int = 5, second: int = 3) -> None:
    """Raises ValueError if a document of a packed row sees the one before it.

    Runs the model three times on a few tokens, without dropout: two documents in a packed row, and each
    alone. The second's logits must be those it has alone, within 8 times what the first is off, which sees
    nothing before it, and within two roundings of the model's dtype or 2^-16 of the largest logit.
    """
    causal: Any = model
    device = next(model.parameters()).device
    ids = torch.arange(first + second, device=device) % causal.config.get_text_config().vocab_size
    documents = ids.split([first, second])
    batch = PackedCollator(max_documents=2)([{"input_ids": document.cpu()} for document in documents])
    inputs = {name: value for name, value in batch.items() if name not in (*_NOT_FOR_THE_MODEL, "use_cache")}
    inputs = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        packed = _logits(model, **inputs).split([first, second])
        alone = [_logits(model, input_ids=document[None]) for document in documents]
    finally:
        for module in trained:
            module.training = True
    noise, off = ((got.float() - want.float()).abs().max() for got, want in zip(packed, alone, strict=True))
    rounding = max(2 * torch.finfo(alone[1].dtype).eps, 2.0**-16) * alone[1].abs().max()
    if not bool(off <= torch.maximum(8 * noise, rounding)):
        raise ValueError(
            f"packed rows on {type(causal).__name__}: a document sees the one before it. Its logits are off "
            f"by {off:.3g} of {alone[1].abs().max():.3g} from those it has alone, the first document's by "
            f"{noise:.3g}. Wanted one document per row (sample_packing: false, PaddedCollator)"
        )
