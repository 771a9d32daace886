"""Rows to messages as chat templates take them: role, content, reasoning_content, tool_calls, and tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from monograph.recipe.chat_template import Message, Tools
from monograph.recipe.keys import DatasetKeys, Recipe

# Other names of the roles in data sets of old.
ROLES = {
    "user": ["user", "human"],
    "assistant": ["assistant", "gpt", "model", "chatgpt", "bot"],
    "system": ["system"],
    "tool": ["tool"],
}

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
    "weight",
)


@dataclass
class Chat:
    """messages: with the names that templates know; trained: which are targets; tools: None for none."""

    messages: list[Message]
    trained: list[bool]
    tools: Tools | None


def without_nulls(value: Any) -> Any:
    """Mappings without null keys: a column of records has every key of any record in all of them."""
    if isinstance(value, Mapping):
        return {name: without_nulls(entry) for name, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _records(value: Any, what: str) -> list[dict[str, Any]]:
    """A list of mappings, or text that is JSON of one."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"{what} is {value!r:.60}, wanted a list, or JSON of one: {error}") from None
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        raise ValueError(f"{what} is {value!r:.60}, wanted a list of mappings")
    return [without_nulls(entry) for entry in value]


class MessageReader:
    """Takes the columns and keys that a dataset names."""

    def __init__(self, recipe: Recipe, dataset: DatasetKeys) -> None:
        # What templates call a key, and what the data call it.
        names = {"role": "role", "content": "content", "reasoning_content": "reasoning_content"}
        names |= dataset.message_property_mappings
        chosen = {
            "role": dataset.message_field_role,
            "content": dataset.message_field_content,
            dataset.template_thinking_key or "reasoning_content": dataset.field_thinking,
        }
        self._names = names | {name: given for name, given in chosen.items() if given}
        self._column = dataset.field_messages or "messages"
        self._tools = dataset.field_tools or "tools"
        self._training = dataset.message_field_training
        self._roles = {name: role for role, known in (dataset.roles or ROLES).items() for name in known}
        self._trained = set(dataset.roles_to_train or ["assistant"])
        self._split = dataset.split_thinking
        self._system, self._drop_system = recipe.default_system_message, dataset.drop_system_message

    def __call__(self, row: Mapping[str, Any], where: str) -> Chat:
        given = row.get(self._column)
        if not isinstance(given, list) or not given:
            columns = ", ".join(map(str, row)) or "nothing"
            raise ValueError(
                f"{where}: column {self._column!r} is missing or empty, wanted a list of messages; the row "
                f"has {columns}; field_messages names another"
            )
        messages, trained = [], []
        for number, entry in enumerate(given):
            message = self._message(entry, f"{where}: message {number}")
            flag = entry.get(self._training) if self._training else None
            messages.append(message)
            trained.append(message["role"] in self._trained if flag is None else bool(flag))
        if self._drop_system and messages[0]["role"] == "system":
            messages, trained = messages[1:], trained[1:]
        if self._system and (not messages or messages[0]["role"] != "system"):
            messages, trained = [{"role": "system", "content": self._system}, *messages], [False, *trained]
        tools = row.get(self._tools)
        return Chat(messages, trained, _records(tools, f"{where}: {self._tools}") or None if tools else None)

    def _message(self, entry: Mapping[str, Any], where: str) -> Message:
        data_names = {data_name: name for name, data_name in self._names.items()}
        message = {
            data_names.get(name, name): value
            for name, value in entry.items()
            if name != self._training and (value if name != self._names["content"] else value is not None)
        }
        role, content = message.get("role"), message.get("content")
        if role not in self._roles:
            raise ValueError(f"{where} has role {role!r}, wanted one of {', '.join(self._roles)}")
        message["role"] = self._roles[role]
        if "tool_calls" in message:
            message["tool_calls"] = _records(message["tool_calls"], f"{where}: tool_calls")
        if not isinstance(content, str) and not (content is None and "tool_calls" in message):
            raise ValueError(f"{where} has {self._names['content']}={content!r}, wanted text")
        if self._split and message["role"] == "assistant" and content and "</think>" in content:
            thought, _, rest = content.partition("</think>")
            message["reasoning_content"] = thought.removeprefix("<think>").strip("\n")
            message["content"] = rest.lstrip("\n")
        return message
