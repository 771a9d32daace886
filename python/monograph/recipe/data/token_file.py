"""Prepared documents as one file for `monograph finetune`: core/monograph/train/token_file.h."""

from __future__ import annotations

import hashlib
import json
import os
from itertools import accumulate
from typing import Any

import torch

from monograph.recipe.config.keys import Recipe
from monograph.recipe.data.prepare import data_keys

FORMAT = "monograph tokens 1"
# What else decides the tokens: the folder of the tokenizer, and these files in it.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)
# Of the keys that prepared data depend on: they decide what is held back alone, or how val_set_size draws it.
_OF_EVALUATION = ("test_datasets", "seed")


def said_of_tokens(recipe: Recipe) -> dict[str, Any]:
    """What a recipe says of its documents, their tokens and targets. What stands at its default is left out,
    but for sequence_len, so that `monograph finetune` need not know the defaults to compare."""
    keys = {name: value for name, value in data_keys(recipe).items() if name not in _OF_EVALUATION}
    keys["tokenizer_config"] = recipe.tokenizer_config
    keys["datasets"] = [
        {
            name: value
            for name, value in entry.items()
            if value is not None and value is not False and value != {}
        }
        for entry in keys["datasets"]
    ]
    return {name: value for name, value in keys.items() if value}


def tokenizer_record(tokenizer: Any, folder: str) -> dict[str, Any]:
    """The hashes of the files of a tokenizer in its folder, and how many tokens the recipe has added."""
    record: dict[str, Any] = {"new_tokens": len(vars(tokenizer).get("ids_of_new_tokens", ()))}
    for name in _TOKENIZER_FILES:
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            with open(path, "rb") as file:
                record[name] = hashlib.sha256(file.read()).hexdigest()
    return record


def write_token_file(
    path: str, documents: Any, tokens_sha256: str, recipe: Recipe, tokenizer: Any, folder: str
) -> None:
    """documents: with columns `input_ids` and `labels`; tokens_sha256: of prepare.Prepared; folder: that of
    the model, which the tokenizer is of if the recipe names no other."""
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
    metadata = {
        "format": FORMAT,
        "pad_token_id": str(tokenizer.pad_token_id or 0),
        "tokens_sha256": tokens_sha256,
        "recipe": json.dumps(said_of_tokens(recipe), default=str),
        "tokenizer": json.dumps(tokenizer_record(tokenizer, recipe.tokenizer_config or folder)),
    }
    save_file(tensors, path, metadata=metadata)
