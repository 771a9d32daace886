"""Prepared documents as one file for `monograph finetune`: core/monograph/train/token_file.h."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

FORMAT = "monograph tokens 1"


def write_token_file(path: str, documents: Any, pad_token_id: int, tokens_sha256: str) -> None:
    """documents: with columns `input_ids` and `labels`; tokens_sha256: of prepare.Prepared."""
    from safetensors.torch import save_file

    lengths: list[int] = []
    ids: list[torch.Tensor] = []
    labels: list[torch.Tensor] = []
    for batch in documents.iter(1000):
        lengths += map(len, batch["input_ids"])
        for parts, column in ((ids, "input_ids"), (labels, "labels")):
            parts.append(torch.tensor([token for row in batch[column] for token in row], dtype=torch.int32))
    tensors = {
        "input_ids": torch.cat(ids),
        "labels": torch.cat(labels),
        "offsets": torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int64),
    }
    metadata = {"format": FORMAT, "pad_token_id": str(pad_token_id), "tokens_sha256": tokens_sha256}
    save_file(tensors, path, metadata=metadata)
