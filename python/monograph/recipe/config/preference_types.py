"""Types of datasets for preferences and rewards: axolotl's names, checked before anything is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from monograph.recipe.config.keys import DatasetKeys
from monograph.recipe.config.trl_keys import TrlDatasetKeys, TrlRecipe

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
# Keys of a dataset, by what reads them.
FILE_KEYS = ("path", "type", "data_files", "ds_type", "name", "split", "revision", "shards", "shards_idx")
_MESSAGES = (
    "message_field_role",
    "message_field_content",
    "message_property_mappings",
    "roles",
    "drop_system_message",
    "chat_template",
)
_ANSWERS: dict[str, tuple[str, ...]] = {
    "pairs": ("field_chosen", "field_rejected"),
    "labelled": ("field_completion", "field_label"),
    "prompts": (),
}
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
        return tuple(entry.name for entry in fields(TrlDatasetKeys))
    if kind == BRADLEY_TERRY:
        return (*FILE_KEYS, "drop_system_message", "chat_template")
    column = () if "argilla" in kind else ("field_messages",)
    return (*FILE_KEYS, *_MESSAGES, *column, *_ANSWERS[rows])


ANSWER_KEYS = tuple(name for answers in _ANSWERS.values() for name in answers)


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


def check_type(recipe: TrlRecipe, dataset: DatasetKeys, where: str) -> list[str]:
    """What is wrong with the type of a dataset for this method, and with keys that it does not read."""
    return _check_name(recipe, dataset, where) or list(
        check_read(dataset, keys_read(dataset.type, recipe.method.rows), where)
    )


def _check_name(recipe: TrlRecipe, dataset: DatasetKeys, where: str) -> list[str]:
    rows, kind = recipe.method.rows, dataset.type
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
