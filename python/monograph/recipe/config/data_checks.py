"""Rules about the keys of datasets, and about keys of a recipe that only some types of datasets read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from monograph.recipe.config.data_files import check_files
from monograph.recipe.config.keys import DatasetKeys, Recipe
from monograph.recipe.config.preference_types import (
    ANSWER_KEYS,
    FILE_KEYS,
    check_columns,
    check_read,
    check_type,
)
from monograph.recipe.config.refused_keys import TYPE_REFUSED
from monograph.recipe.config.trl_keys import TrlRecipe

_CHAT_KEYS = (
    "field_messages",
    "message_field_role",
    "message_field_content",
    "message_property_mappings",
    "field_tools",
    "field_thinking",
    "template_thinking_key",
    "split_thinking",
    "message_field_training",
    "roles",
    "roles_to_train",
    "train_on_eos",
    "drop_system_message",
    "chat_template",
)
# Types of documents and the keys of a dataset that each reads, besides those that say where its rows are.
DATASET_TYPES: dict[str, tuple[str, ...]] = {
    "completion": ("field",),
    "alpaca": (),
    "instruction": (),
    "chat_template": _CHAT_KEYS,
    "input_output": (),
}
# Other wordings of alpaca (documents.py).
STYLES = ("alpaca:instruct", "alpaca:chat", "alpaca:chatml", "alpaca:phi")
PROMPT_KEYS = (
    "system_prompt",
    "field_instruction",
    "field_input",
    "field_output",
    "format",
    "no_input_format",
)
CHAT_TEMPLATES = ("tokenizer_default", "chatml", "jinja", "tokenizer_default_fallback_chatml")
SPECIAL_TOKENS = ("pad_token", "eos_token", "bos_token", "unk_token", "additional_special_tokens")


def check_data(recipe: Recipe, errors: list[str], notices: list[str]) -> None:
    if not recipe.datasets:
        errors.append("datasets: missing; write `- path: train.jsonl` and `type: alpaca` below it")
    documents = not (isinstance(recipe, TrlRecipe) and recipe.method.rows != "documents")
    for where in ("datasets", "test_datasets"):
        for number, dataset in enumerate(getattr(recipe, where)):
            name = f"{where}.{number}"
            if not dataset.path:
                errors.append(f"{name}.path: missing; write a .jsonl or .parquet file")
            else:
                errors.extend(check_files(dataset, name))
            errors.extend(_check_shards(dataset, name))
            if documents:
                errors.extend(_check_dataset(dataset, name))
                errors.extend(check_columns(dataset, name))
            else:
                assert isinstance(recipe, TrlRecipe)
                errors.extend(check_type(recipe, dataset, name))
    if recipe.test_datasets and recipe.val_set_size:
        errors.append("test_datasets and val_set_size both say what to evaluate on; leave one out")
    _check_special_tokens(recipe, errors)
    if recipe.pad_to_sequence_len is False and recipe.sample_packing:
        notices.append(
            "pad_to_sequence_len: ignored; packed rows have one length, or each packing would be compiled"
        )
    _check_templates(recipe, errors, notices)
    if documents:
        notices.extend(_unread(recipe))


def _check_shards(dataset: DatasetKeys, where: str) -> Iterable[str]:
    if dataset.shards is None:
        if dataset.shards_idx is not None:
            yield f"{where}.shards_idx is {dataset.shards_idx} without shards; write shards, or leave it out"
    elif dataset.shards < 1:
        yield f"{where}.shards is {dataset.shards}, wanted 1 or more"
    elif not 0 <= (dataset.shards_idx or 0) < dataset.shards:
        yield f"{where}.shards_idx is {dataset.shards_idx}, wanted 0 to {dataset.shards - 1}"


def _check_special_tokens(recipe: Recipe, errors: list[str]) -> None:
    for name, value in recipe.special_tokens.items():
        if name not in SPECIAL_TOKENS:
            errors.append(f"special_tokens.{name}: unknown; wanted one of {', '.join(SPECIAL_TOKENS)}")
            continue
        several = name == "additional_special_tokens"
        tokens = value if several and isinstance(value, list) else [None if several else value]
        if not all(isinstance(token, str) and token for token in tokens):
            wanted = "a list of tokens" if several else "a token"
            errors.append(f"special_tokens.{name} is {value!r}, wanted {wanted}")


def _check_templates(recipe: Recipe, errors: list[str], notices: list[str]) -> None:
    entries = [*recipe.datasets, *recipe.test_datasets]
    named = {"chat_template": recipe.chat_template} | {
        f"{where}.{number}.chat_template": entry.chat_template
        for where in ("datasets", "test_datasets")
        for number, entry in enumerate(getattr(recipe, where))
    }
    for where, name in named.items():
        if name not in (None, *CHAT_TEMPLATES):
            notices.append(f"{where}: {name} is taken from the tokenizer; none is shipped by name")
        if name == "jinja" and not recipe.chat_template_jinja:
            errors.append(
                f"{where} is jinja and chat_template_jinja is missing; write the template or its file"
            )
    names = {entry.chat_template or recipe.chat_template for entry in entries} or {recipe.chat_template}
    if recipe.chat_template_jinja and not names & {None, "jinja"}:
        errors.append(
            f"chat_template_jinja: chat_template is {sorted(map(str, names))[0]}, so it would do nothing; "
            "write chat_template: jinja, or leave one out"
        )


def _check_dataset(dataset: DatasetKeys, where: str) -> Iterable[str]:
    kind = dataset.type
    if isinstance(kind, dict):
        for name in kind:
            if name in TYPE_REFUSED:
                yield f"{where}.type.{name}: not supported; {TYPE_REFUSED[name]}"
            elif name not in PROMPT_KEYS:
                yield f"{where}.type.{name}: unknown key; allowed are {', '.join(PROMPT_KEYS)}"
        yield from _check_read(dataset, (), where)
        return
    base = kind.split(":")[0].split(".")[0]
    if kind not in (*DATASET_TYPES, "chat_template.default", *STYLES):
        near = difflib.get_close_matches(base, DATASET_TYPES, n=1, cutoff=0.5)
        hint = {"sharegpt": "chat_template", "chatml": "chat_template"}.get(base, near[0] if near else None)
        suffix = f"; did you mean {hint}?" if hint else ""
        yield f"{where}.type is {kind!r}, wanted one of {', '.join(DATASET_TYPES)}{suffix}"
        return
    yield from _check_read(dataset, DATASET_TYPES[base], where)
    if dataset.roles_to_train == [] and dataset.message_field_training is None:
        yield (
            f"{where}.roles_to_train is [] without message_field_training, so nothing is trained; wanted "
            "roles, or message_field_training, the key of a message that says whether it is a target"
        )


def _check_read(dataset: DatasetKeys, names: tuple[str, ...], where: str) -> Iterable[str]:
    """Keys that a type of documents does not read; check_columns names the columns of preferences."""
    for error in check_read(dataset, (*FILE_KEYS, *names), where):
        if not error.startswith(tuple(f"{where}.{name}:" for name in ANSWER_KEYS)):
            yield error


def _unread(recipe: Recipe) -> Iterable[str]:
    """Keys of the recipe that none of its datasets reads."""
    entries = [*recipe.datasets, *recipe.test_datasets]
    kinds = {"mapping" if isinstance(entry.type, dict) else entry.type.split(".")[0] for entry in entries}
    if kinds and "chat_template" not in kinds:
        chat = ("chat_template", "chat_template_jinja", "chat_template_kwargs", "default_system_message")
        for name in (*chat, "eot_tokens"):
            if getattr(recipe, name):
                yield f"{name}: no dataset is of chats, so `generate` alone goes by it"
    if recipe.train_on_inputs and kinds <= {"completion", "input_output"} and kinds:
        yield f"train_on_inputs: ignored; type {' and '.join(sorted(kinds))} says itself what is a target"
    if recipe.eval_sample_packing is not None and not (recipe.val_set_size or recipe.test_datasets):
        yield "eval_sample_packing: ignored; nothing is evaluated"
