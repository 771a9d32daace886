"""The table of keys, entries of `datasets`: their rows, their types, and what is wrong with one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from monograph.recipe.config.data_files import check_files
from monograph.recipe.config.key_row import key, refused, rows_of, words

if TYPE_CHECKING:
    from monograph.recipe.config.keys import Recipe

PREFERENCES = refused(
    "it is for preferences and rewards, which TRL trains; write rl: dpo, ipo, kto, orpo, simpo or grpo"
)
# What reads a key: every type; one of them; messages of chats and of preferences, of chats alone; answers.
FILE, COMPLETION, COLUMN, MESSAGE, CHAT = "file", "completion", "column", "message", "chat"
PAIRS, LABELLED = "pairs", "labelled"


@dataclass
class DatasetKeys:
    """One entry of `datasets` or `test_datasets`."""

    path: str = key(
        "",
        "a .jsonl, .json or .parquet file, a folder of them, a name on the Hub, or a format: see data_files",
        of=FILE,
    )
    type: str | dict[str, str] = key(
        "", "completion, alpaca, instruction, chat_template, input_output", of=FILE
    )
    data_files: str | list[str] | None = key(
        None,
        "files inside the folder or dataset `path`; beside `path: json` (parquet, csv, text) themselves",
        of=FILE,
    )
    ds_type: str | None = key(
        None, "json, parquet, csv, text or arrow, where the file's ending does not say it", of=FILE
    )
    name: str | None = key(None, "configuration of a dataset on the Hub", of=FILE)
    split: str | None = key(
        None, "split to take, `train[:10%]` too; train by default, which a single file is", of=FILE
    )
    revision: str | None = key(None, "commit or tag of a dataset on the Hub", of=FILE)
    field: str | None = key(None, "completion: the column with the text; `text` by default", of=COMPLETION)
    field_messages: str | None = key(
        None, "chat_template: the column with the messages; `messages`", of=COLUMN
    )
    message_field_role: str | None = key(None, "chat_template: the name of the role; `role`", of=MESSAGE)
    message_field_content: str | None = key(
        None, "chat_template: the name of the content; `content`", of=MESSAGE
    )
    message_property_mappings: dict[str, str] = key(
        {}, "chat_template: the template's names of keys to yours", of=MESSAGE
    )
    field_tools: str | None = key(
        None, "chat_template: the column with the tools of a chat; `tools`", of=CHAT
    )
    field_thinking: str | None = key(
        None, "chat_template: the reasoning of a message; `reasoning_content`", of=CHAT
    )
    template_thinking_key: str | None = key(
        None, "chat_template: its name in the template; the same", of=CHAT
    )
    split_thinking: bool = key(
        False, "chat_template: `<think>...</think>` in a content becomes reasoning", of=CHAT
    )
    message_field_training: str | None = key(
        None, "chat_template: a boolean per message: is it a target?", of=CHAT
    )
    roles: dict[str, list[str]] | None = key(None, "chat_template: other names of the roles", of=MESSAGE)
    roles_to_train: list[str] | None = key(
        None,
        "chat_template: whose messages are targets; [assistant]; `[]`: those flagged true alone",
        of=CHAT,
    )
    train_on_eos: Literal["all", "turn", "last", "none"] | None = key(
        None, "chat_template: whether the end of a turn is a target; `turn`: of the turns trained on", of=CHAT
    )
    drop_system_message: bool = key(False, "chat_template: leaves a first system message out", of=MESSAGE)
    chat_template: str | None = key(None, "as the key of the recipe, for this dataset", of=MESSAGE)
    shards: int | None = key(None, "cuts the dataset into so many parts", of=FILE)
    shards_idx: int | None = key(None, "and takes this one, 0 by default", of=FILE)


@dataclass
class TrlDatasetKeys(DatasetKeys):
    """One entry of `datasets`, with the columns of preferences."""

    field_chosen: str | None = key(
        None, "chat_template.*: the column with the better answer; `chosen`", of=PAIRS, own=PREFERENCES
    )
    field_rejected: str | None = key(
        None, "chat_template.*: the column with the worse answer; `rejected`", of=PAIRS, own=PREFERENCES
    )
    field_completion: str | None = key(
        None, "chat_template.default for kto: the answer; `completion`; ours", of=LABELLED
    )
    field_label: str | None = key(
        None, "chat_template.default for kto: is it a good one? `label`; ours", of=LABELLED
    )


DATASET_KEYS = rows_of(DatasetKeys)
_ALL_KEYS = rows_of(TrlDatasetKeys)


def _of(*readers: str) -> tuple[str, ...]:
    return tuple(name for name, row in _ALL_KEYS.items() if row.of in readers)


FILE_KEYS = _of(FILE)
ANSWER_KEYS = _of(PAIRS, LABELLED)
# Keys of other recipes inside an entry, and inside a mapping as its `type`, by what to do instead.
_REFUSED = words(
    {
        PREFERENCES.reason: "step_separator train_on_last_step_only",
        "write sequence_len": "max_completion_length",
        "code from a dataset is never run; use JSONL or Parquet files": "trust_remote_code",
        "write type: chat_template": "conversation",
        "write message_field_training": "message_field_training_detail",
        "transform the file": "input_transform",
        "write shards": "preprocess_shards",
        "leave it out: it is for distillation": "temperature logprobs_field",
        "write chat_template_jinja for the recipe, and chat_template: jinja here": "chat_template_jinja",
        "write type: chat_template with field_messages and roles": "field_human field_model",
        "write a mapping as type, with format": "input_format",
        "write train_on_eos, which holds for eot_tokens too": "train_on_eot",
        "rows are read and not made up; write the path of a file": (
            "length sequence_length min_input_id max_input_id seed"
        ),
        "leave the rows out of the file": "skip",
        "write field": "text_column",
    }
)
TYPE_REFUSED: dict[str, str] = {
    "field_system": "write system_prompt, one for all rows, or type: chat_template",
    "system_format": "write the whole text as system_prompt",
}
DATASET_REFUSED: dict[str, str] = {
    **{name: row.own.reason for name, row in _ALL_KEYS.items() if row.own},
    **_REFUSED,
}
# Types of documents and the keys of a dataset that each reads, besides those that say where its rows are.
DATASET_TYPES: dict[str, tuple[str, ...]] = {
    "completion": _of(COMPLETION),
    "alpaca": (),
    "instruction": (),
    "chat_template": _of(COLUMN, MESSAGE, CHAT),
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
# Keys of a mapping, `user_defined` in axolotl's words, by what a row is.
USER_DEFINED = {
    "pairs": (
        "field_system field_prompt field_chosen field_rejected prompt_format chosen_format rejected_format"
    ),
    "labelled": "field_system field_prompt field_completion field_label prompt_format completion_format",
    "prompts": "field_system field_prompt prompt_format",
}
PASSTHROUGH = "passthrough"
CHATS = {
    "pairs": ("chat_template.default", "chat_template.argilla_chat", "chat_template.argilla"),
    "labelled": ("chat_template.default",),
    "prompts": ("chat_template.default",),
}
BRADLEY_TERRY = "bradley_terry.chat_template"
_WORDED = ("chatml", "llama3", "zephyr")  # axolotl's wordings without a template


def named_type(kind: str) -> str:
    """A type by its whole name."""
    return f"{kind}.default" if kind == "chat_template" else kind


def is_function(kind: str) -> bool:
    """Whether a type is the dotted name of a function of the user's."""
    return kind.count(".") >= 1 and not kind.startswith(("chat_template.", "bradley_terry.", "user_defined."))


def keys_read(kind: str | dict[str, str], rows: str) -> tuple[str, ...]:
    """The keys of a dataset that its type reads; a function is given all of them."""
    if isinstance(kind, dict) or kind == PASSTHROUGH:
        return FILE_KEYS
    kind = named_type(kind)
    if is_function(kind):
        return tuple(_ALL_KEYS)
    if kind == BRADLEY_TERRY:
        return (*FILE_KEYS, "drop_system_message", "chat_template")
    column = () if "argilla" in kind else _of(COLUMN)
    return (*FILE_KEYS, *_of(MESSAGE), *column, *_of(rows))


def check_entries(recipe: Recipe) -> Iterable[str]:
    """All that is wrong with the entries of `datasets` and `test_datasets`."""
    for where in ("datasets", "test_datasets"):
        for number, dataset in enumerate(getattr(recipe, where)):
            name = f"{where}.{number}"
            if not dataset.path:
                yield f"{name}.path: missing; write a .jsonl or .parquet file"
            else:
                yield from check_files(dataset, name)
            yield from _check_shards(dataset, name)
            if recipe.rows == "documents":
                yield from _check_dataset(dataset, name)
                yield from check_columns(dataset, name)
            else:
                yield from check_type(recipe, dataset, name)


def _check_shards(dataset: DatasetKeys, where: str) -> Iterable[str]:
    if dataset.shards is None:
        if dataset.shards_idx is not None:
            yield f"{where}.shards_idx is {dataset.shards_idx} without shards; write shards, or leave it out"
    elif dataset.shards < 1:
        yield f"{where}.shards is {dataset.shards}, wanted 1 or more"
    elif not 0 <= (dataset.shards_idx or 0) < dataset.shards:
        yield f"{where}.shards_idx is {dataset.shards_idx}, wanted 0 to {dataset.shards - 1}"


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


def check_columns(dataset: DatasetKeys, where: str) -> list[str]:
    """Columns of preferences, which documents have not."""
    names = [name for name in ANSWER_KEYS if getattr(dataset, name, None)]
    return [f"{where}.{name}: it is for preferences (rl, reward_model); leave it out" for name in names]


def check_read(dataset: DatasetKeys, read: tuple[str, ...], where: str) -> Iterable[str]:
    """Keys that are written and not among those that the type of the dataset reads: FILE_KEYS and others."""
    mapping = isinstance(dataset.type, dict)
    kind = "a mapping" if mapping else dataset.type
    for entry in fields(dataset):
        value = getattr(dataset, entry.name)
        if entry.name in read or value is None or value is False or value in ({}, ""):
            continue
        allowed = ", ".join(read[len(FILE_KEYS) :])
        hint = (
            f"it reads {allowed}"
            if allowed
            else "its keys name columns"
            if mapping
            else "its columns are fixed"
        )
        yield f"{where}.{entry.name}: type {kind} does not read it; leave it out ({hint})"


def check_type(recipe: Recipe, dataset: DatasetKeys, where: str) -> list[str]:
    """What is wrong with the type of a dataset for this method, and with keys that it does not read."""
    return _check_name(recipe, dataset, where) or list(
        check_read(dataset, keys_read(dataset.type, recipe.rows), where)
    )


def _check_name(recipe: Recipe, dataset: DatasetKeys, where: str) -> list[str]:
    rows, kind = recipe.rows, dataset.type
    if isinstance(kind, dict):
        known = USER_DEFINED[rows].split()
        return [
            f"{where}.type.{name}: unknown key; allowed are {', '.join(known)}"
            for name in kind
            if name not in known
        ]
    kind = named_type(kind)
    if kind.split(".")[0] in _WORDED:
        return [
            f"{where}.type is {kind!r}: wordings without the model's template are not shipped; write "
            "chat_template.default with field_messages, or a mapping with prompt_format"
        ]
    wanted = [*CHATS[rows], PASSTHROUGH]
    if recipe.reward_model:
        wanted.append(BRADLEY_TERRY)
    if kind in wanted or is_function(kind):
        return []
    return [
        f"{where}.type is {kind!r}, wanted one of {', '.join(wanted)}, a mapping ({USER_DEFINED[rows]}), or "
        "the dotted name of a function"
    ]
