"""Tokens that a model does not have: `tokens` and `special_tokens` in the tokenizer, and rows for them.

A new row is the mean of those of the base, so that the same recipe makes the same rows. It means nothing
until it is trained: an adapter that does not train all of them is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from monograph.recipe.config.keys import Recipe, TrlRecipe

_MORE = "additional_special_tokens"


def add_tokens(recipe: Recipe, tokenizer: Any) -> list[int]:
    """Adds what the recipe names, in axolotl's order; gives the ids of those that were not there."""
    from tokenizers import AddedToken

    known = set(tokenizer.get_vocab())

    def whole(token: str) -> Any:
        return AddedToken(token, lstrip=False, rstrip=False, normalized=False)

    for name, token in recipe.special_tokens.items():
        if name != _MORE and token in known:
            setattr(tokenizer, name, token)
        elif name != _MORE:
            tokenizer.add_special_tokens({name: whole(token)})
    tokenizer.add_tokens([whole(token) for token in recipe.tokens or []])
    if more := recipe.special_tokens.get(_MORE):
        tokenizer.add_special_tokens({_MORE: list(more)})
    added = {token: index for token, index in tokenizer.get_vocab().items() if token not in known}
    read = {token: index for token, index in added.items() if _is_read(token, tokenizer)}
    vars(tokenizer)["ids_of_new_tokens"] = sorted(read.values())
    if read and not (
        recipe.lora_modules_to_save or recipe.peft_trainable_token_indices or recipe.lora_model_dir
    ):
        added = read
        first = min(added, key=lambda token: added[token])
        if isinstance(recipe, TrlRecipe):
            raise ValueError(
                f"{_key_of(recipe, first)}: {first!r} is not a token of the model, and TRL trains no new "
                f"rows; {_without_trl(recipe)}, or name a token that exists"
            )
        raise ValueError(
            f"{_key_of(recipe, first)}: {first!r} is not a token of the model, and nothing would train its "
            f"row; write {_instead(sorted(added.values()), tied=False)}, or name a token that exists"
        )
    return sorted(added.values())


def _is_read(token: str, tokenizer: Any) -> bool:
    """Whether a model ever reads a token: padding alone is masked wherever it stands."""
    return token != tokenizer.pad_token or token in (tokenizer.eos_token, tokenizer.bos_token)


def _without_trl(recipe: TrlRecipe) -> str:
    first = "add the tokens to the folder of the model first"
    return first if recipe.rl or recipe.reward_model else f"leave trainer out, or {first}"


def _key_of(recipe: Recipe, token: str) -> str:
    """The key that names this token."""
    if token in (recipe.tokens or []):
        return "tokens"
    names = (name for name, value in recipe.special_tokens.items() if token == value)
    return f"special_tokens.{next(names, _MORE)}"


def _instead(ids: Sequence[int], *, tied: bool) -> str:
    rows = list(ids)
    indices = f"{rows}" if tied else f"{{embed_tokens: {rows}, lm_head: {rows}}}"
    return f"peft_trainable_token_indices: {indices}, or lora_modules_to_save: [embed_tokens, lm_head]"


def grow_vocabulary(model: Any, recipe: Recipe, folder: str) -> None:
    """Gives a base the rows that the tokenizer of a recipe needs."""
    from monograph.nn import PackedEmbedding, QuantLinear
    from monograph.recipe.data.encode import load_tokenizer

    if not (recipe.tokens or recipe.special_tokens):
        return
    tokenizer = load_tokenizer(recipe, folder)
    new = vars(tokenizer)["ids_of_new_tokens"]
    vars(model)["ids_of_new_tokens"] = new
    wanted = max(tokenizer.get_vocab().values()) + 1
    rows = model.get_input_embeddings().weight.shape[0]
    if wanted <= rows:
        return
    key = "tokens" if recipe.tokens else "special_tokens"
    if not new:
        raise ValueError(
            f"special_tokens.pad_token: {tokenizer.pad_token!r} is not a token of the model, which has no "
            f"row to spare ({rows}); name one that exists, as pad_token: {tokenizer.eos_token!r}"
        )
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    for what, layer in (("head", head), ("table of tokens", table)):
        if isinstance(layer, QuantLinear | PackedEmbedding):
            raise ValueError(
                f"{key}: the vocabulary would grow from {rows} to {wanted} rows, and the {what} of "
                f"{recipe.base_model} is packed ({layer.format.name}); wanted a {what} of 16 or 32 bits, or "
                "tokens that exist"
            )
    if isinstance(recipe, TrlRecipe):
        raise ValueError(
            f"{key}: the vocabulary would grow from {rows} to {wanted} rows, which TRL's trainers do not "
            f"save; {_without_trl(recipe)}"
        )
    model.resize_token_embeddings(wanted, mean_resizing=False)
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            layer.weight[rows:] = _mean_of_rows(layer.weight[:rows])
    vars(model)["rows_before_new_tokens"] = rows


def _mean_of_rows(table: torch.Tensor) -> torch.Tensor:
    """In float64, halves added to each other: the same bits for any number of threads."""
    means = []
    for columns in table.split(256, dim=1):
        total = columns.cpu().double()
        while len(total) > 1:
            half = len(total) // 2
            total = torch.cat([total[:half] + total[half : 2 * half], total[2 * half :]])
        means.append(total[0] / len(table))
    return torch.cat(means).to(table)


def has_new_rows(model: Any) -> bool:
    """Whether `grow_vocabulary` has given rows to the base of this model."""
    return "rows_before_new_tokens" in vars(model.get_base_model())


def check_new_rows_are_trained(model: Any) -> None:
    """Raises if the adapter leaves the row of a new token as it is, in the embedding or in the head. A row
    that the base had to spare holds nothing either; LoRA on the table may train that one too."""
    base = model.get_base_model()
    grown = has_new_rows(model)
    total = base.config.get_text_config().vocab_size
    new = set(vars(base).get("ids_of_new_tokens", ()))
    if grown:
        new |= set(range(vars(base)["rows_before_new_tokens"], total))
    config = model.peft_config[model.active_adapter]
    for layer in (base.get_input_embeddings(), base.get_output_embeddings()) if new else ():
        trained = {name: p for name, p in layer.named_parameters() if p.requires_grad and p.dim() == 2}
        rows = [p.shape[0] for name, p in trained.items() if not name.startswith("lora_")]
        path = next(name for name, module in base.named_modules() if module is layer)
        if total in rows or (rows and _covers(config.trainable_token_indices, path, new)):
            continue
        if not grown and any(name.startswith("lora_") for name in trained):
            continue
        tied = bool(getattr(base.config.get_text_config(), "tie_word_embeddings", False))
        raise ValueError(
            f"tokens: rows {min(new)} to {max(new)} of {path} are new, and the adapter does not train them "
            f"all; write {_instead(sorted(new), tied=tied)}"
        )


def _covers(indices: Any, path: str, new: set[int]) -> bool:
    """Whether PEFT's trainable_token_indices name all these rows of a layer; a tied head has those of the
    embedding."""
    if isinstance(indices, dict):
        lists = [rows for name, rows in indices.items() if path == name or path.endswith(f".{name}")]
        indices = lists[0] if lists else next(iter(indices.values()), [])
    return new <= set(indices or [])


def save_adapter(model: Any, folder: str) -> None:
    """PEFT's folder of an adapter. Of a vocabulary that grew PEFT would add both tables of the base, and of
    modules_to_save three copies of each; all that differs from the base is trained."""
    with _in_order(model.peft_config.values()):
        model.save_pretrained(folder, save_embedding_layers=False if has_new_rows(model) else "auto")


@contextmanager
def _in_order(configs: Iterable[Any]) -> Iterator[None]:
    """PEFT keeps names of modules as sets, whose order in a file would be another in each process."""
    sets = [(c, name, value) for c in configs for name, value in vars(c).items() if isinstance(value, set)]
    try:
        for config, name, value in sets:
            setattr(config, name, sorted(value))
        yield
    finally:
        for config, name, value in sets:
            setattr(config, name, value)
