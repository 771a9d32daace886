"""Rows of preference datasets in the columns that TRL takes: prompt, chosen, rejected; completion, label."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from monograph.recipe.config.dataset_keys import BRADLEY_TERRY, PASSTHROUGH, named_type
from monograph.recipe.config.keys import DatasetKeys, TrlDatasetKeys, TrlRecipe
from monograph.recipe.data.chat_messages import BOOKKEEPING, MessageReader
from monograph.recipe.data.chat_template import Message
from monograph.recipe.data.documents import Prompt

Row = dict[str, Any]
Reader = Callable[[Mapping[str, Any], str], Row]

COLUMNS = {
    "pairs": ("prompt", "chosen", "rejected"),
    "labelled": ("prompt", "completion", "label"),
    "prompts": ("prompt",),
}


def row_reader(recipe: TrlRecipe, dataset: DatasetKeys) -> Reader:
    """The function that makes a row for TRL; its second argument names the row in errors."""
    rows = recipe.method.rows
    if isinstance(dataset.type, dict):
        return _UserDefined(dataset.type, rows)
    kind = named_type(dataset.type)
    if kind == PASSTHROUGH:
        return lambda row, where: {name: _column(row, name, where) for name in _present(row, rows)}
    if kind == BRADLEY_TERRY:
        return _Chats(recipe, dataset).of_texts
    chats = _Chats(recipe, dataset)
    return chats.of_pairs_of_chats if "argilla" in kind else chats.of_messages


def prompt_wording(kind: Mapping[str, str]) -> Prompt:
    """How a mapping words a prompt, for `generate`."""
    wording = (kind.get("prompt_format") or "{prompt}").replace("{prompt}", "{instruction}")
    return Prompt(wording, wording)


def _present(row: Mapping[str, Any], rows: str) -> tuple[str, ...]:
    """Columns of TRL's: pairs may leave the prompt inside the answers, and KTO takes pairs, too."""
    pairs = COLUMNS["pairs"]
    if rows == "labelled" and {"chosen", "rejected"} <= set(row):
        rows = "pairs"
    return pairs[1:] if rows == "pairs" and "prompt" not in row else COLUMNS[rows]


def _column(row: Mapping[str, Any], name: str, where: str) -> Any:
    if row.get(name) is None:
        found = ", ".join(map(str, row)) or "nothing"
        raise ValueError(f"{where}: column {name!r} is missing or empty; the row has {found}")
    return row[name]


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    value = _column(row, name, where)
    if not isinstance(value, str):
        raise ValueError(f"{where}: column {name!r} is {value!r:.60}, wanted text")
    return value


def _label(row: Mapping[str, Any], name: str, where: str) -> bool:
    value = _column(row, name, where)
    if not isinstance(value, bool):
        raise ValueError(f"{where}: column {name!r} is {value!r:.60}, wanted true or false")
    return value


class _UserDefined:
    """Texts by the formats of a mapping; `{prompt}`, `{system}`, `{chosen}` ... stand for columns."""

    def __init__(self, kind: Mapping[str, str], rows: str) -> None:
        self._kind, self._answers = kind, [name for name in COLUMNS[rows] if name not in ("prompt", "label")]
        self._labelled = rows == "labelled"

    def __call__(self, row: Mapping[str, Any], where: str) -> Row:
        prompt = _text(row, self._kind.get("field_prompt") or "prompt", where)
        system = row.get(self._kind.get("field_system") or "system") or ""
        made: Row = {"prompt": self._worded("prompt", {"system": system, "prompt": prompt})}
        for name in self._answers:
            made[name] = self._worded(
                name, {name: _text(row, self._kind.get(f"field_{name}") or name, where)}
            )
        if self._labelled:
            made["label"] = _label(row, self._kind.get("field_label") or "label", where)
        return made

    def _worded(self, name: str, values: Mapping[str, str]) -> str:
        # Not str.format: texts and wordings may hold braces. One pass: a value may hold "{prompt}".
        parts = [self._kind.get(f"{name}_format") or "{" + name + "}"]
        for key, value in values.items():
            marked = "{" + key + "}"
            parts = [
                piece
                for number, part in enumerate(parts)
                for piece in (_split(part, marked, value) if number % 2 == 0 else [part])
            ]
        return "".join(parts)


def _split(text: str, mark: str, value: str) -> list[str]:
    """The text cut at its marks, with the value between: even parts are wording, odd ones values."""
    pieces: list[str] = []
    for number, part in enumerate(text.split(mark)):
        pieces += [value, part] if number else [part]
    return pieces


class _Chats:
    """Messages, which TRL renders by the model's template."""

    def __init__(self, recipe: TrlRecipe, dataset: DatasetKeys) -> None:
        self._reader = MessageReader(recipe, dataset)
        self._rows = recipe.method.rows
        self._messages = dataset.field_messages or ("prompt" if self._rows == "prompts" else "messages")
        names = dataset if isinstance(dataset, TrlDatasetKeys) else TrlDatasetKeys()
        self._answers = {
            "chosen": names.field_chosen or "chosen",
            "rejected": names.field_rejected or "rejected",
            "completion": names.field_completion or "completion",
        }
        self._label = names.field_label or "label"

    def of_messages(self, row: Mapping[str, Any], where: str) -> Row:
        """A chat up to its last question, and answers to it: a text, a message, or the chat with it."""
        prompt = self._chat(_column(row, self._messages, where), where)
        made: Row = {"prompt": prompt}
        for name in COLUMNS[self._rows]:
            if name in self._answers:
                column = self._answers[name]
                made[name] = [self._answer(_column(row, column, where), prompt, f"{where}: {column}")]
            elif name == "label":
                made[name] = _label(row, self._label, where)
        return made

    def of_pairs_of_chats(self, row: Mapping[str, Any], where: str) -> Row:
        """Two chats that differ in their last message."""
        chats = [
            self._chat(_column(row, self._answers[name], where), f"{where}: {name}", answered=True)
            for name in ("chosen", "rejected")
        ]
        if chats[0][:-1] != chats[1][:-1]:
            raise ValueError(
                f"{where}: chosen and rejected differ before their last message; wanted one prompt"
            )
        return {"prompt": chats[0][:-1], "chosen": chats[0][-1:], "rejected": chats[1][-1:]}

    def of_texts(self, row: Mapping[str, Any], where: str) -> Row:
        """axolotl's Bradley-Terry rows: system, input, chosen, rejected."""
        system = [self._reader.written("system", row["system"])] if row.get("system") else []
        prompt = self._chat([*system, self._reader.written("user", _text(row, "input", where))], where)
        answers = {name: _text(row, name, where) for name in ("chosen", "rejected")}
        return {"prompt": prompt} | {
            name: [{"role": "assistant", "content": text}] for name, text in answers.items()
        }

    def _chat(self, given: Any, where: str, *, answered: bool = False) -> list[Message]:
        if isinstance(given, str):
            given = [self._reader.written("user", given)]
        chat = self._reader.read(given, where)
        messages = [_plain(message, f"{where}: message {n}") for n, message in enumerate(chat.messages)]
        if (messages[-1]["role"] == "assistant") != answered:
            wanted = "an answer" if answered else "a question"
            raise ValueError(f"{where}: the last message is of {messages[-1]['role']}, wanted {wanted}")
        return messages

    def _answer(self, given: Any, prompt: list[Message], where: str) -> Message:
        if isinstance(given, str):
            given = self._reader.written("assistant", given)
        if isinstance(given, Mapping):
            given = [given]
        if not isinstance(given, list) or not given:
            raise ValueError(f"{where} is {given!r:.60}, wanted text, a message or a list of them")
        messages = [
            _plain(self._reader.message(entry, f"{where}: message {n}"), f"{where}: message {n}")
            for n, entry in enumerate(given)
        ]
        if messages[-1]["role"] != "assistant":
            raise ValueError(f"{where}: its last message is of {messages[-1]['role']}, wanted assistant")
        if len(messages) > 1 and messages[:-1] != prompt[-len(messages[:-1]) :]:
            raise ValueError(
                f"{where} is a chat that does not go on from the prompt; wanted its last message"
            )
        return messages[-1]


def _plain(message: Message, where: str) -> Message:
    """Role and content: what answers of preference data are compared by."""
    more = [name for name in message if name not in ("role", "content", *BOOKKEEPING)]
    if more or not isinstance(message.get("content"), str):
        found = more[0] if more else f"content {message.get('content')!r:.40}"
        raise ValueError(f"{where} has {found}; preference data take role and content, which is text")
    return {"role": message["role"], "content": message["content"]}
