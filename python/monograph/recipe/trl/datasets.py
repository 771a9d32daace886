"""The datasets that a trainer of TRL is given: our tokens and labels for documents, else TRL's columns."""

from __future__ import annotations

import inspect
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from monograph.recipe.config.data_files import load_rows
from monograph.recipe.config.dataset_keys import is_function, named_type
from monograph.recipe.config.keys import DatasetKeys, TrlRecipe
from monograph.recipe.data.chat import ChatReader
from monograph.recipe.data.chat_template import chat_template
from monograph.recipe.data.preference_rows import row_reader
from monograph.recipe.data.prepare import prepare, split_rows
from monograph.recipe.trl.import_path import import_path
from monograph.recipe.trl.stream import make_stream


class Datasets(NamedTuple):
    """told: one line on rows that are not there, or not whole; empty if all are."""

    train: Any
    eval: Any | None
    told: str = ""


def make_datasets(recipe: TrlRecipe, tokenizer: Any) -> Datasets:
    """Training and evaluation rows; the tokenizer gets the chat template that the recipe means."""
    if recipe.streaming:
        evaluated = replace(recipe, datasets=recipe.test_datasets, test_datasets=[])
        held = prepare(evaluated, tokenizer).train if recipe.test_datasets else None
        return Datasets(make_stream(recipe, tokenizer), held)
    if recipe.method.rows == "documents":
        prepared = prepare(recipe, tokenizer)
        return Datasets(prepared.train, prepared.eval, prepared.what_is_missing())
    _choose_template(recipe, tokenizer)
    train, told = _fitting(recipe, _rows(recipe, "datasets", tokenizer), tokenizer)
    held = None
    if recipe.test_datasets:
        held, _ = _fitting(recipe, _rows(recipe, "test_datasets", tokenizer), tokenizer)
    elif recipe.val_set_size:
        train, held = split_rows(recipe, train)
    return Datasets(train, held, told)


def _is_chat(dataset: DatasetKeys) -> bool:
    return isinstance(dataset.type, str) and "chat_template" in dataset.type


def _choose_template(recipe: TrlRecipe, tokenizer: Any) -> None:
    """TRL renders all chats by the template of the tokenizer."""
    chats = [entry for entry in (*recipe.datasets, *recipe.test_datasets) if _is_chat(entry)]
    names = {entry.chat_template or recipe.chat_template for entry in chats}
    if len(names) > 1:
        raise ValueError(
            f"datasets: chat_template is {sorted(map(str, names))}; TRL takes one for all of them"
        )
    if chats or recipe.chat_template or recipe.chat_template_jinja:
        tokenizer.chat_template = chat_template(recipe, tokenizer, chats[0].chat_template if chats else None)


def _rows(recipe: TrlRecipe, where: str, tokenizer: Any) -> Any:
    from datasets import concatenate_datasets

    parts = []
    for number, entry in enumerate(getattr(recipe, where)):
        rows = load_rows(entry, f"{where}.{number}")
        if isinstance(entry.type, str) and is_function(named_type(entry.type)):
            made = _by_function(recipe, entry, number, rows, tokenizer)
        else:
            made = _read(recipe, entry, f"{where}.{number} {entry.path}", rows, tokenizer)
        parts.append(made)
    kinds = {str(part.features["prompt"]) for part in parts if "prompt" in part.features}
    if len(kinds) > 1:
        raise ValueError(f"{where}: some have chats for prompts and some text; TRL takes one of the two")
    return concatenate_datasets(parts)


def _read(recipe: TrlRecipe, entry: DatasetKeys, where: str, rows: Any, tokenizer: Any) -> Any:
    read = row_reader(recipe, entry)

    def one(row: dict[str, Any], number: int) -> dict[str, Any]:
        made = read(row, f"{where} row {number}")
        if recipe.chat_template_kwargs and _is_chat(entry) and recipe.method.rows != "prompts":
            made["chat_template_kwargs"] = recipe.chat_template_kwargs
        return made

    if _is_chat(entry) and recipe.method.rows != "prompts" and len(rows):
        _check_end(recipe, entry, one(rows[0], 0), f"{where} row 0", tokenizer)
    # Rewards may ask for any column; the other trainers take theirs alone.
    gone = [] if recipe.method.rows == "prompts" else rows.column_names
    return rows.map(one, with_indices=True, remove_columns=gone, num_proc=recipe.dataset_processes)


def _check_end(
    recipe: TrlRecipe, entry: DatasetKeys, row: dict[str, Any], where: str, tokenizer: Any
) -> None:
    """Something must end an answer, or a model trained so never stops."""
    answer = row.get("chosen") or row.get("completion") or []
    plain = DatasetKeys(type="chat_template", chat_template=entry.chat_template)
    ChatReader(recipe, plain, tokenizer)({"messages": [*row["prompt"], *answer]}, where)


def _by_function(recipe: TrlRecipe, entry: DatasetKeys, number: int, rows: Any, tokenizer: Any) -> Any:
    """axolotl's way: `name(cfg)` gives a function of a row, and perhaps options of `Dataset.map`."""
    assert isinstance(entry.type, str)
    made = import_path(entry.type, f"datasets.{number}.type")(asdict(recipe), dataset_idx=number)
    transform, options = made if isinstance(made, tuple) else (made, {})
    if "tokenizer" in inspect.signature(transform).parameters:
        options = {**options, "fn_kwargs": {"tokenizer": tokenizer}}
    return rows.map(transform, num_proc=recipe.dataset_processes, **options)


def _fitting(recipe: TrlRecipe, rows: Any, tokenizer: Any) -> tuple[Any, str]:
    """Prompts within sequence_len, and a line on those left out. GRPO itself cuts none; others do."""
    if recipe.method.rows != "prompts":
        return rows, ""
    options = {"tokenize": False, "add_generation_prompt": True, **recipe.chat_template_kwargs}

    def fits(row: dict[str, Any]) -> bool:
        prompt = row["prompt"]
        if not isinstance(prompt, str):
            prompt = tokenizer.apply_chat_template(prompt, **options)
        return len(tokenizer(prompt, verbose=False)["input_ids"]) <= recipe.sequence_len

    kept = rows.filter(fits, num_proc=recipe.dataset_processes)
    if not len(kept):
        raise ValueError(
            f"datasets: all {len(rows)} prompts are longer than sequence_len {recipe.sequence_len}"
        )
    gone = len(rows) - len(kept)
    return kept, f"of {len(rows):,} prompts: {gone:,} too long" if gone else ""
