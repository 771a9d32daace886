"""Tokens that the embedding of a model has no row for: named before torch would fail on them."""

from __future__ import annotations

from typing import Any

from monograph.recipe.config.keys import Recipe
from monograph.recipe.config.model_folder import naming


def _rows(recipe: Recipe, folder: str) -> int | None:
    """Rows of the embedding by config.json; None where it does not say."""
    from transformers import AutoConfig

    with naming("base_model", recipe.base_model):
        config = AutoConfig.from_pretrained(folder)
    rows = getattr(config.get_text_config(), "vocab_size", None)
    return rows if isinstance(rows, int) else None


def check_token(recipe: Recipe, tokenizer: Any, token: int, rows: int) -> None:
    """ValueError if a token that is trained on or asked with has no row."""
    if token < rows:
        return
    key = "tokenizer_config" if recipe.tokenizer_config else "base_model"
    raise ValueError(
        f"{key}: the tokenizer of {recipe.tokenizer_config or recipe.base_model} gives token {token} "
        f"({tokenizer.convert_ids_to_tokens(token)!r}), and the embedding has {rows} rows, wanted more than "
        f"{token}; take the tokenizer of the model, or add the token with tokens: [...]"
    )


def check_documents(recipe: Recipe, folder: str, tokenizer: Any, parts: list[Any]) -> None:
    """The same for all documents of prepared data, and for padding, before the model is loaded."""
    import pyarrow.compute

    if recipe.tokens or recipe.special_tokens:
        return  # the embedding grows with them (new_tokens.py)
    rows = _rows(recipe, folder)
    if rows is None or max(tokenizer.get_vocab().values()) < rows:
        return
    highest = tokenizer.pad_token_id or 0
    for part in parts:
        for batch in part.with_format("arrow").iter(10_000):
            found = pyarrow.compute.max(pyarrow.compute.list_flatten(batch["input_ids"])).as_py()
            highest = max(highest, found or 0)
    check_token(recipe, tokenizer, highest, rows)
