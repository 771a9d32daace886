"""Chats to documents, by the model's template; targets are the assistant's words and the end of its turns."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from monograph.recipe.documents import Document, Span
from monograph.recipe.keys import DatasetKeys, Recipe

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Other names of the roles in data sets of old.
ROLES = {
    "user": ["user", "human"],
    "assistant": ["assistant", "gpt", "model", "chatgpt", "bot"],
    "system": ["system"],
    "tool": ["tool"],
}

# Stands for the content of a message when looking where the template puts it: characters of no language.
_MARK = "\ue000\ue001\ue000"


def chat_template(recipe: Recipe, tokenizer: Any, own: str | None = None) -> str:
    """The Jinja template that the recipe (or a dataset of it: `own`) asks for."""
    name = own or recipe.chat_template
    if name == "chatml":
        return CHATML
    if recipe.chat_template_jinja and name in (None, "jinja"):
        if os.path.isfile(recipe.chat_template_jinja):
            with open(recipe.chat_template_jinja, encoding="utf-8") as file:
                return file.read()
        return recipe.chat_template_jinja
    if isinstance(tokenizer.chat_template, str):
        return tokenizer.chat_template
    if name == "tokenizer_default_fallback_chatml":
        return CHATML
    raise ValueError(
        "chat_template: the tokenizer has none; write chat_template: chatml (its <|im_end|> must be a token "
        "of the model), or chat_template_jinja"
    )


class ChatReader:
    """Makes a document from a row with a list of messages.

    The text is the template's, rendered once. Where the content of a message lies in it is found by rendering
    again with a mark in its place: what the two texts have in common before and behind is not the message.
    """

    def __init__(self, recipe: Recipe, dataset: DatasetKeys, tokenizer: Any) -> None:
        mapping = dataset.message_property_mappings
        self._tokenizer = tokenizer
        self._template = chat_template(recipe, tokenizer, dataset.chat_template)
        self._options = recipe.chat_template_kwargs
        self._system = recipe.default_system_message
        self._drop_system = dataset.drop_system_message
        self._column = dataset.field_messages or "messages"
        self._role = dataset.message_field_role or mapping.get("role") or "role"
        self._content = dataset.message_field_content or mapping.get("content") or "content"
        self._training = dataset.message_field_training
        self._roles = {name: role for role, names in (dataset.roles or ROLES).items() for name in names}
        self._trained = set(dataset.roles_to_train or ["assistant"])
        self._on_inputs = recipe.train_on_inputs
        self._eos = dataset.train_on_eos or "turn"
        ends = [tokenizer.eos_token, *(recipe.eot_tokens or [])]
        self._ends = [end for end in ends if end]

    def __call__(self, row: Mapping[str, Any], where: str) -> Document:
        messages, trained = self._messages(row, where)
        text = self._render(messages)
        contents = [self._find(messages, number, text, where) for number in range(len(messages))]
        if self._on_inputs:
            return Document(text, (Span(0, len(text)),), begins=False, ends=False)
        borders = [content.begin for content in contents[1:]] + [len(text)]
        last = max((number for number, is_target in enumerate(trained) if is_target), default=-1)
        targets = []
        for number, (content, border) in enumerate(zip(contents, borders, strict=True)):
            end = self._end_of_turn(text, content.end, border)
            wanted = {"all": True, "turn": trained[number], "last": number == last, "none": False}[self._eos]
            if trained[number]:
                stop = end.end if end and wanted else content.end
                targets.append(Span(content.begin, stop))
                if end is None and wanted:
                    raise ValueError(self._no_end(text[content.end : border], where))
            elif end and wanted:
                targets.append(end)
        return Document(text, tuple(targets), begins=False, ends=False)

    def _messages(self, row: Mapping[str, Any], where: str) -> tuple[list[dict[str, str]], list[bool]]:
        given = row.get(self._column)
        if not isinstance(given, list) or not given:
            columns = ", ".join(map(str, row)) or "nothing"
            raise ValueError(
                f"{where}: column {self._column!r} is missing or empty, wanted a list of messages; the row "
                f"has {columns}; field_messages names another"
            )
        messages, trained = [], []
        for number, message in enumerate(given):
            role, content = message.get(self._role), message.get(self._content)
            if role not in self._roles:
                raise ValueError(
                    f"{where}: message {number} has role {role!r}, wanted one of {', '.join(self._roles)}"
                )
            if not isinstance(content, str):
                raise ValueError(f"{where}: message {number} has {self._content}={content!r}, wanted text")
            flag = message.get(self._training) if self._training else None
            messages.append({"role": self._roles[role], "content": content})
            trained.append(self._roles[role] in self._trained if flag is None else bool(flag))
        if self._drop_system and messages[0]["role"] == "system":
            messages, trained = messages[1:], trained[1:]
        if self._system and (not messages or messages[0]["role"] != "system"):
            messages, trained = [{"role": "system", "content": self._system}, *messages], [False, *trained]
        return messages, trained

    def _render(self, messages: list[dict[str, str]]) -> str:
        return self._tokenizer.apply_chat_template(
            messages, chat_template=self._template, tokenize=False, **self._options
        )

    def _find(self, messages: list[dict[str, str]], number: int, text: str, where: str) -> Span:
        """Where the content of a message lies in the text."""
        marked = list(messages)
        marked[number] = {**messages[number], "content": _MARK}
        other = self._render(marked)
        before, _, behind = other.partition(_MARK)
        if _MARK not in other or len(text) < len(before) + len(behind):
            return Span(len(text), len(text))  # the template leaves this message out
        if not (text.startswith(before) and text.endswith(behind)):
            raise ValueError(
                f"{where}: the chat template writes other messages differently when message {number} "
                "changes, so targets cannot be told; write chat_template_jinja without that rule"
            )
        return Span(len(before), len(text) - len(behind))

    def _end_of_turn(self, text: str, begin: int, border: int) -> Span | None:
        """The first token behind the content, before the next message, that ends a turn."""
        found = [(text.find(end, begin, border), len(end)) for end in self._ends]
        places = [Span(place, place + length) for place, length in found if place >= 0]
        return min(places, default=None)

    def _no_end(self, behind: str, where: str) -> str:
        ends = ", ".join(map(repr, self._ends)) or "no token"
        return (
            f"{where}: nothing ends the assistant's turn: the template writes {behind[:40]!r} behind it, and "
            f"the end is {ends}; a model trained so never stops. "
            "Write eot_tokens: [...] or special_tokens.eos_token"
        )
