"""Chats to documents, by the model's template; targets are what the assistant writes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from monograph.recipe.chat_messages import BOOKKEEPING, Chat, MessageReader
from monograph.recipe.chat_template import ChatRenderer, Message
from monograph.recipe.document import Document, Span
from monograph.recipe.keys import DatasetKeys, Recipe

# Stands for a part of a message when looking where the template puts it: characters of no language.
_MARK = "\ue000\ue001\ue000"

# Templates show these of the last turns and may leave them out of earlier ones.
_REASONING = ("reasoning_content", "reasoning", "thinking")


# What templates write of an answer without reasoning; no target, as of an answer that is its content alone.
_EMPTY_BLOCK = re.compile(r"<(think|thinking)>\s*</\1>\s*|\[THINK\]\s*\[/THINK\]\s*")


class ChatReader:
    """Makes a document from a row with a list of messages, and perhaps tools.

    The text is the template's, rendered once, of messages with all their keys. Where a message lies in it is
    found by rendering again with a mark in its place, or at the end of a part of it: what the two texts have
    in common before and behind is not the message. A message that is more than its content (reasoning, tool
    calls) is a target from where the template's prompt for an answer ends.
    """

    def __init__(self, recipe: Recipe, dataset: DatasetKeys, tokenizer: Any) -> None:
        self._read = MessageReader(recipe, dataset)
        self._render = ChatRenderer(recipe, tokenizer, dataset.chat_template)
        self._can_show: dict[str, bool] = {}
        self._on_inputs = recipe.train_on_inputs
        self._eos = dataset.train_on_eos or "turn"
        ends = [tokenizer.eos_token, *(recipe.eot_tokens or [])]
        self._ends = [end for end in ends if end]

    def __call__(self, row: Mapping[str, Any], where: str) -> Document:
        chat = self._read(row, where)
        text = self._render(chat.messages, chat.tools)
        self._check_tools(chat, where)
        spans = [self._span(chat, number, text, where) for number in range(len(chat.messages))]
        if self._on_inputs:
            return Document(text, (Span(0, len(text)),), begins=False, ends=False)
        borders = [span.begin for span in spans[1:]] + [len(text)]
        last = max((number for number, is_target in enumerate(chat.trained) if is_target), default=-1)
        targets = []
        for number, (span, border) in enumerate(zip(spans, borders, strict=True)):
            trained, parts = chat.trained[number], self._parts(chat.messages[number])
            end = self._end_of_turn(text, span.end, border)
            wanted = {"all": True, "turn": trained, "last": number == last, "none": False}[self._eos]
            if trained:
                if end is None and (wanted or parts):
                    raise ValueError(self._no_end(text[span.end : border], where))
                # What closes a message of several parts, the brackets of a tool call, stands behind the last.
                content_end = end.begin if end and parts else span.end
                targets.append(Span(span.begin, end.end if end and wanted else content_end))
            elif end and wanted:
                targets.append(end)
        return Document(text, tuple(targets), begins=False, ends=False)

    @staticmethod
    def _parts(message: Message) -> list[str]:
        """The keys of a message that say something, besides its content."""
        return [name for name in message if name not in ("content", *BOOKKEEPING)]

    def _span(self, chat: Chat, number: int, text: str, where: str) -> Span:
        """Where a message lies in the text; a key that the template leaves out of this turn is removed."""
        message = chat.messages[number]
        for name in self._parts(message):
            if not self._shows(chat, number, name, text):
                if name not in _REASONING or not self._can_show_reasoning(name):
                    raise ValueError(
                        f"{where}: message {number} has {name}, which the chat template does not show; "
                        "remove it, or write a chat_template_jinja that shows it"
                    )
                del message[name]
        if message["role"] != "assistant" or not self._parts(message):
            found = self._content(chat, number, text)
            if found is not None:
                return found
            if message["role"] != "assistant":
                raise ValueError(self._changes(number, where))
        end = max(self._ends_of_parts(chat, number, text, where))
        begin = self._begin(chat, number, text, end, where)
        first = self._first_difference(chat, number, text)
        # From some characters before: a prompt may open the block.
        for block in _EMPTY_BLOCK.finditer(text, max(0, begin - 20), max(begin, first)):
            if block.start() <= begin < block.end():
                begin = block.end()
        return Span(begin, end)

    def _content(self, chat: Chat, number: int, text: str) -> Span | None:
        """Where the content of a message lies; None if the template changes more with it."""
        other = self._changed(chat, number, content=_MARK)
        before, _, behind = other.partition(_MARK)
        if _MARK not in other or len(text) < len(before) + len(behind):
            return Span(len(text), len(text))  # the template leaves this message out
        if not (text.startswith(before) and text.endswith(behind)):
            return None
        return Span(len(before), len(text) - len(behind))

    def _changed(self, chat: Chat, number: int, **change: Any) -> str:
        messages = list(chat.messages)
        messages[number] = {**messages[number], **change}
        return self._render(messages, chat.tools)

    def _shows(self, chat: Chat, number: int, name: str, text: str) -> bool:
        """Whether the text depends on this key of the message; of tool calls, on each of them."""
        message = chat.messages[number]
        if name != "tool_calls":
            if isinstance(message[name], str):
                return _MARK in self._changed(chat, number, **{name: _MARK})
            messages = list(chat.messages)
            messages[number] = {other: value for other, value in message.items() if other != name}
            return self._render(messages, chat.tools) != text
        for index, call in enumerate(message[name]):
            if _MARK not in self._changed(chat, number, tool_calls=_marked_call(message[name], index)):
                return False
            function = call.get("function", call)
            if function.get("arguments"):
                calls = _changed_call(message[name], index, arguments={})
                if self._changed(chat, number, tool_calls=calls) == text:
                    return False
        return True

    def _can_show_reasoning(self, name: str) -> bool:
        """Whether the template shows this key of a last message, as it may leave it out of earlier ones."""
        if name not in self._can_show:
            answer = {"role": "assistant", "content": "b", name: _MARK}
            try:
                shown = self._render([{"role": "user", "content": "a"}, answer], None)
            except ValueError:
                shown = ""
            self._can_show[name] = _MARK in shown
        return self._can_show[name]

    def _ends_of_parts(self, chat: Chat, number: int, text: str, where: str) -> list[int]:
        """Where each part of a message ends in the text; of tool calls, the name of the last."""
        message = chat.messages[number]
        changes: list[dict[str, Any]] = [
            {name: message[name] + _MARK}
            for name in ("content", *self._parts(message))
            if isinstance(message.get(name), str) and message[name]
        ]
        if calls := message.get("tool_calls"):
            changes.append({"tool_calls": _marked_call(calls, len(calls) - 1)})
        ends = []
        for change in changes:
            other = self._changed(chat, number, **change)
            _, mark, behind = other.rpartition(_MARK)
            if mark and text.endswith(behind):
                ends.append(len(text) - len(behind))
            elif mark or "content" not in change:
                raise ValueError(self._changes(number, where))
        if not ends:
            raise ValueError(self._changes(number, where))
        return ends

    def _begin(self, chat: Chat, number: int, text: str, end: int, where: str) -> int:
        """Where the prompt for this answer ends: what a model is given that is to write it."""
        earlier = chat.messages[:number]
        try:
            asked, told = (self._render(earlier, chat.tools, prompt=prompt) for prompt in (True, False))
        except ValueError:
            asked, told = "", " "  # not a chat the template would render: nothing is known of its prompt
        if asked and text.startswith(asked) and len(asked) <= end:
            return len(asked)
        # The template writes earlier turns differently once others follow: the prompt alone is looked for.
        prompt = asked.removeprefix(told)
        first = self._first_difference(chat, number, text)
        begins = text.rfind(prompt, 0, first) if prompt and asked.startswith(told) else -1
        if begins < 0:
            raise ValueError(
                f"{where}: the chat template asks for an answer with {prompt or asked[-40:]!r}, which does "
                f"not stand in front of message {number}, so its targets cannot be told; change "
                "chat_template_kwargs, or write another chat_template_jinja"
            )
        return begins + len(prompt)

    def _first_difference(self, chat: Chat, number: int, text: str) -> int:
        """The first character that depends on what the message says."""
        message = chat.messages[number]
        changes = {name: _MARK for name in message if isinstance(message[name], str) and name != "role"}
        if calls := message.get("tool_calls"):
            other = self._changed(chat, number, **changes, tool_calls=_marked_call(calls, 0, whole=True))
        else:
            other = self._changed(chat, number, **changes)
        pairs = enumerate(zip(text, other, strict=False))
        return next((index for index, (one, two) in pairs if one != two), min(len(text), len(other)))

    def _check_tools(self, chat: Chat, where: str) -> None:
        """Every tool must be in the text."""
        if chat.tools is None:
            return
        marked = [_changed_function(tool, name=_name(tool) + _MARK) for tool in chat.tools]
        if self._render(chat.messages, marked).count(_MARK) < len(marked):
            raise ValueError(
                f"{where}: the row has {len(marked)} tools, and the chat template does not show them all; "
                "remove them, or write a chat_template_jinja that shows them"
            )

    def _end_of_turn(self, text: str, begin: int, border: int) -> Span | None:
        """The first token behind the content, before the next message, that ends a turn."""
        found = [(text.find(end, begin, border), len(end)) for end in self._ends]
        spans = [Span(first, first + length) for first, length in found if first >= 0]
        return min(spans, default=None)

    def _changes(self, number: int, where: str) -> str:
        return (
            f"{where}: the chat template writes other messages differently when message {number} "
            "changes, so targets cannot be told; write chat_template_jinja without that rule"
        )

    def _no_end(self, behind: str, where: str) -> str:
        ends = ", ".join(map(repr, self._ends)) or "no token"
        return (
            f"{where}: nothing ends the assistant's turn: the template writes {behind[:40]!r} behind it, and "
            f"the end is {ends}; a model trained so never stops. "
            "Write eot_tokens: [...] or special_tokens.eos_token"
        )


def _name(record: Mapping[str, Any]) -> str:
    """The name of a tool or of a call, which some write without `function` around it."""
    return str(record.get("function", record).get("name", ""))


def _changed_function(record: Mapping[str, Any], **change: Any) -> dict[str, Any]:
    if "function" in record:
        return {**record, "function": {**record["function"], **change}}
    return {**record, **change}


def _changed_call(calls: list[dict[str, Any]], index: int, **change: Any) -> list[dict[str, Any]]:
    return [*calls[:index], _changed_function(calls[index], **change), *calls[index + 1 :]]


def _marked_call(calls: list[dict[str, Any]], index: int, *, whole: bool = False) -> list[dict[str, Any]]:
    return _changed_call(calls, index, name=_MARK if whole else _name(calls[index]) + _MARK)
