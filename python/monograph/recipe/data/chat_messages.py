"""Rows to messages as chat templates take them: role, content, reasoning_content, tool_calls, and tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from monograph.recipe.config.keys import DatasetKeys, Recipe
from monograph.recipe.data.chat_template import Message, Tools

# Other names of the roles in data sets of old.
ROLES = {
    "user": ["user", "human"],
    "assistant": ["assistant", "gpt", "model", "chatgpt", "bot"],
    "system": ["system"],
    "developer": ["developer"],
    "tool": ["tool"],
}

# What templates call reasoning; they show it of the last turns and may leave it out of earlier ones.
REASONING = ("reasoning_content", "reasoning", "thinking")

# What a row may hold besides text; none of it is trained on.
_NOT_TEXT = ("image", "images", "audio", "audios", "video", "videos")

# Keys that number or link messages; a template may use them, and loses nothing of the chat if it does not.
BOOKKEEPING = (
    "id",
    "index",
    "name",
    "role",
    "timestamp",
    "tool_call_id",
    "train",
    "training",
    "type",
    "weight",  # says whether the message is a target, and nothing of the chat
)


@dataclass
class Chat:
    """messages: with the names that templates know; trained: which are targets; tools: None for none;
    weighed: a `weight` of 0 takes a message out of the targets."""

    messages: list[Message]
    trained: list[bool]
    tools: Tools | None
    weighed: bool = False


def without_nulls(value: Any) -> Any:
    """Mappings without null keys: a column of records has every key of any record in all of them."""
    if isinstance(value, Mapping):
        return {name: without_nulls(entry) for name, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _parsed(value: Any, what: str, wanted: str) -> Any:
    """Text that is JSON, read; anything else without nulls. In JSON text a null means something."""
    if not isinstance(value, str):
        return without_nulls(value)
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"{what} is {value!r:.60}, wanted {wanted}, or JSON of one: {error}") from None


def _records(value: Any, what: str) -> list[dict[str, Any]]:
    """A list of mappings, or text that is JSON of one."""
    value = _parsed(value, what, "a list")
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        raise ValueError(f"{what} is {value!r:.60}, wanted a list of mappings")
    return value


def _with_mapping(records: list[dict[str, Any]], key: str, what: str) -> list[dict[str, Any]]:
    """Tools or calls whose `arguments` or `parameters` are a mapping, where they were JSON text of one."""
    read = []
    for number, record in enumerate(records):
        function = record.get("function", record)
        given = function.get(key) if isinstance(function, Mapping) else None
        if isinstance(given, str):
            name = f"{what}.{number}: {key}"
            value = _parsed(given, name, "a mapping") if given.strip() else {}
            if not isinstance(value, Mapping):
                raise ValueError(f"{name} is {given!r:.60}, wanted a mapping, or JSON of one")
            changed = {**function, key: value}
            record = {**record, "function": changed} if "function" in record else changed
        read.append(record)
    return read


def _text_of(content: Any, where: str) -> Any:
    """Content that is a list of parts, as one text; anything but text in it is refused by its name."""
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        return content
    for number, part in enumerate(content):
        kind = part.get("type")
        if kind != "text" or not isinstance(part.get("text"), str):
            known = kind or next((name for name, value in part.items() if value is not None), None)
            hint = "; write it as reasoning_content" if known == "thinking" else ""
            raise ValueError(f"{where} has a part of type {known!r} (part {number}); only text is read{hint}")
    return "".join(part["text"] for part in content)


def _check_same(thoughts: Mapping[str, Any], where: str, split: str | None = None) -> None:
    """Reasoning under several names, or also inside the content (`split`), must be one text."""
    found = [*thoughts.items()] + ([("<think> in its content", split)] if split is not None else [])
    for name, text in found[1:]:
        if text != found[0][1]:
            raise ValueError(
                f"{where} has reasoning twice: {found[0][0]}={found[0][1]!r:.60} and {name}={text!r:.60}; "
                "wanted one, or the same text"
            )


class MessageReader:
    """Takes the columns and keys that a dataset names."""

    def __init__(self, recipe: Recipe, dataset: DatasetKeys) -> None:
        # What templates call a key, and what the data call it.
        names = {"role": "role", "content": "content", "reasoning_content": "reasoning_content"}
        names |= dataset.message_property_mappings
        self._thinking = dataset.template_thinking_key or "reasoning_content"
        thinking = dataset.field_thinking or (dataset.template_thinking_key and "reasoning_content")
        chosen = {
            "role": dataset.message_field_role,
            "content": dataset.message_field_content,
            self._thinking: thinking,
        }
        self._names = names | {name: given for name, given in chosen.items() if given}
        self._column = dataset.field_messages or "messages"
        self._tools = dataset.field_tools or "tools"
        self._training = dataset.message_field_training
        self._roles = {name: role for role, known in (dataset.roles or ROLES).items() for name in known}
        # An empty list leaves it to message_field_training alone.
        self._trained = {"assistant"} if dataset.roles_to_train is None else set(dataset.roles_to_train)
        self._has_weights = "weight" not in (self._training, *self._names.values())
        self._split = dataset.split_thinking
        self._system, self._drop_system = recipe.default_system_message, dataset.drop_system_message

    def __call__(self, row: Mapping[str, Any], where: str) -> Chat:
        for name in _NOT_TEXT:
            if row.get(name) and name not in (self._column, self._tools):
                raise ValueError(f"{where}: column {name!r} is not empty; only text is trained on")
        given = row.get(self._column)
        if isinstance(given, str):
            given = _records(given, f"{where}: {self._column}")
        if not isinstance(given, list) or not given:
            columns = ", ".join(map(str, row)) or "nothing"
            raise ValueError(
                f"{where}: column {self._column!r} is missing or empty, wanted a list of messages; the row "
                f"has {columns}; field_messages names another"
            )
        chat = self.read(given, where)
        chat.tools = self._tools_of(row.get(self._tools), f"{where}: {self._tools}")
        return chat

    def read(self, given: list[Mapping[str, Any]], where: str) -> Chat:
        """A list of messages in the names that templates know."""
        if not isinstance(given, list) or not given:
            raise ValueError(f"{where}: found {given!r:.60}, wanted a list of messages")
        messages, trained, weighed = [], [], False
        for number, entry in enumerate(given):
            message = self.message(entry, f"{where}: message {number}")
            wanted = self._wanted(entry, message["role"], f"{where}: message {number}")
            weight = self._weight(entry, f"{where}: message {number}")
            if weight and not wanted:
                raise ValueError(
                    f"{where}: message {number} ({message['role']}) has weight 1 and is no target of "
                    "roles_to_train or message_field_training; wanted weight 0 or none"
                )
            messages.append(message)
            trained.append(wanted and weight != 0)
            weighed = weighed or (wanted and weight == 0)
        if self._drop_system and messages[0]["role"] == "system":
            messages, trained = messages[1:], trained[1:]
        if self._system and (not messages or messages[0]["role"] != "system"):
            messages, trained = [{"role": "system", "content": self._system}, *messages], [False, *trained]
        return Chat(messages, trained, None, weighed)

    def _wanted(self, entry: Mapping[str, Any], role: str, where: str) -> bool:
        """Whether the recipe or the message's own flag makes it a target."""
        flag = entry.get(self._training) if self._training else None
        if flag is None:
            return role in self._trained
        if not isinstance(flag, bool):
            raise ValueError(f"{where} has {self._training}={flag!r:.60}, wanted true or false")
        return flag

    def _weight(self, entry: Mapping[str, Any], where: str) -> int | None:
        """OpenAI's `weight`: 0 or 1; None if there is none."""
        weight = entry.get("weight") if self._has_weights else None
        if weight is None:
            return None
        # A column of numbers and nulls may come as floats.
        if isinstance(weight, bool) or not isinstance(weight, int | float) or weight not in (0, 1):
            raise ValueError(f"{where} has weight={weight!r:.60}, wanted 0 (no target) or 1 (a target)")
        return int(weight)

    def _tools_of(self, given: Any, what: str) -> Tools | None:
        if not given:
            return None
        return _with_mapping(_records(given, what), "parameters", what) or None

    def written(self, role: str, content: str) -> Message:
        """A message as the data would spell it."""
        spelled = next((name for name, meaning in self._roles.items() if meaning == role), role)
        return {self._names["role"]: spelled, self._names["content"]: content}

    def message(self, entry: Mapping[str, Any], where: str) -> Message:
        """A message in the names that templates know."""
        if not isinstance(entry, Mapping):
            raise ValueError(f"{where} is {entry!r:.60}, wanted a mapping with role and content")
        data_names = {data_name: name for name, data_name in self._names.items()}
        # Where the data call role or content otherwise, a key of the template's name is another thing.
        renamed = [name for name in ("role", "content") if self._names[name] != name]
        message = {
            data_names.get(name, name): value
            for name, value in entry.items()
            if name != self._training
            and (name not in renamed or name in data_names)
            and (value if name != self._names["content"] else value is not None)
        }
        known = (*REASONING, self._thinking)
        thoughts = {
            name: entry[name] for name in entry if data_names.get(name, name) in known and entry[name]
        }
        _check_same(thoughts, where)
        if "content" in message:
            message["content"] = _text_of(message["content"], where)
        role, content = message.get("role"), message.get("content")
        if role not in self._roles:
            named = self._names["role"]
            raise ValueError(f"{where} has {named} {role!r}, wanted one of {', '.join(self._roles)}")
        message["role"] = self._roles[role]
        if "tool_calls" in message:
            calls = _records(message["tool_calls"], f"{where}: tool_calls")
            message["tool_calls"] = _with_mapping(calls, "arguments", f"{where}: tool_calls")
        if not isinstance(content, str) and not (content is None and "tool_calls" in message):
            raise ValueError(f"{where} has {self._names['content']}={content!r}, wanted text")
        if self._split and message["role"] == "assistant" and content and "</think>" in content:
            thought, _, rest = content.partition("</think>")
            thought = thought.removeprefix("<think>").strip("\n")
            if thought or not thoughts:
                _check_same({name: str(text).strip("\n") for name, text in thoughts.items()}, where, thought)
                message[self._thinking] = thought
            message["content"] = rest.lstrip("\n")
        return message
