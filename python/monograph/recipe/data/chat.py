"""Chats to documents, by the model's template; targets are what the assistant writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monograph.recipe.config.keys import DatasetKeys, Recipe
from monograph.recipe.data.chat_messages import Chat, MessageReader
from monograph.recipe.data.chat_spans import ChatSpans, said_besides_content
from monograph.recipe.data.chat_template import ChatRenderer
from monograph.recipe.data.document import Document, Span


class ChatReader:
    """Makes a document from a row with a list of messages, and perhaps tools.

    The text is the template's, rendered once, of messages with all their keys. A template that marks what
    the assistant writes (`{% generation %}`) is taken at its word; of others `ChatSpans` finds it.
    """

    def __init__(self, recipe: Recipe, dataset: DatasetKeys, tokenizer: Any) -> None:
        self._read = MessageReader(recipe, dataset)
        self._render = ChatRenderer(recipe, tokenizer, dataset.chat_template)
        self._can_show: dict[str, bool] = {}
        self._on_inputs = recipe.train_on_inputs
        self._eos = dataset.train_on_eos or "turn"
        self._flagged = dataset.message_field_training is not None
        ends = [tokenizer.eos_token, *(recipe.eot_tokens or [])]
        self._ends = [end for end in ends if end]

    def __call__(self, row: Mapping[str, Any], where: str) -> Document:
        chat = self._read(row, where)
        text = self._render(chat.messages, chat.tools)
        places = ChatSpans(self._render, chat, text, where, self._can_show)
        places.check_tools()
        whole = [dict(message) for message in chat.messages]  # a template may ask whether a key is there
        places.remove_hidden_reasoning()
        if self._on_inputs:
            return Document(text, (Span(0, len(text)),), begins=False, ends=False)
        marked = self._asks_what_marks_say(chat)
        targets = self._render.generated(whole, chat.tools) if marked else None
        if targets is None:
            targets = self._found(chat, text, places.spans(), where)
        if not any(span.end > span.begin for span in targets) and not (self._flagged or chat.weighed):
            raise ValueError(self._no_target(chat, where))
        return Document(text, tuple(targets), begins=False, ends=False)

    def _asks_what_marks_say(self, chat: Chat) -> bool:
        """Whether all that the assistant writes is wanted and nothing else, which is what marks stand for."""
        answers = [message["role"] == "assistant" for message in chat.messages]
        return self._eos == "turn" and chat.trained == answers

    def _found(self, chat: Chat, text: str, spans: list[Span], where: str) -> list[Span]:
        boundaries = [span.begin for span in spans[1:]] + [len(text)]
        last = max((number for number, is_target in enumerate(chat.trained) if is_target), default=-1)
        targets = []
        for number, (span, boundary) in enumerate(zip(spans, boundaries, strict=True)):
            trained, parts = chat.trained[number], said_besides_content(chat.messages[number])
            end = self._end_of_turn(text, span.end, boundary)
            wanted = {"all": True, "turn": trained, "last": number == last, "none": False}[self._eos]
            if trained:
                if end is None and (wanted or parts):
                    raise ValueError(self._no_end(text[span.end : boundary], where))
                # What closes a message of several parts, the brackets of a tool call, stands behind the last.
                content_end = end.begin if end and parts else span.end
                targets.append(Span(span.begin, end.end if end and wanted else content_end))
            elif end and wanted:
                targets.append(end)
        return targets

    def _end_of_turn(self, text: str, begin: int, boundary: int) -> Span | None:
        """The first token behind the content, before the next message, that ends a turn."""
        found = [(text.find(end, begin, boundary), len(end)) for end in self._ends]
        spans = [Span(first, first + length) for first, length in found if first >= 0]
        return min(spans, default=None)

    def _no_end(self, behind: str, where: str) -> str:
        ends = ", ".join(map(repr, self._ends)) or "no token"
        return (
            f"{where}: nothing ends the assistant's turn: the template writes {behind[:40]!r} behind it, and "
            f"the end is {ends}; a model trained so never stops. "
            "Write eot_tokens: [...] or special_tokens.eos_token"
        )

    def _no_target(self, chat: Chat, where: str) -> str:
        roles = ", ".join(message["role"] for message in chat.messages)
        return (
            f"{where}: no token of this chat is a target; its messages are by {roles}. Remove the row, or "
            "write roles_to_train; a template's {% generation %} must mark what the assistant writes"
        )
