"""Where the messages of a chat lie in the text that a template makes of it.

Templates say nothing about it, so the chat is rendered again with something changed: what two texts have in
common before and behind is not the message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monograph.recipe.data.chat_messages import BOOKKEEPING, REASONING, Chat
from monograph.recipe.data.chat_template import ChatRenderer, Message
from monograph.recipe.data.document import Span

# Stands for a part of a message when looking where the template puts it: characters of no language.
_MARK = "\ue000\ue001\ue000"


def said_besides_content(message: Message) -> list[str]:
    """The keys of a message that say something, besides its content."""
    return [name for name in message if name not in ("content", *BOOKKEEPING)]


class ChatSpans:
    """One chat and its text.

    An answer begins where the template's prompt for it ends, for that is what a model is given that is to
    write it. Where no prompt is known, a message that is its content alone begins with its content.
    """

    def __init__(
        self, render: ChatRenderer, chat: Chat, text: str, where: str, can_show: dict[str, bool]
    ) -> None:
        """can_show: what is known of the template, which chats share."""
        self._render, self._chat, self._text, self._where = render, chat, text, where
        self._can_show = can_show

    def check_tools(self) -> None:
        """Every tool must be in the text."""
        tools = self._chat.tools
        if tools is None:
            return
        marked = [_changed_function(tool, name=_name(tool) + _MARK) for tool in tools]
        if self._render(self._chat.messages, marked).count(_MARK) < len(marked):
            raise ValueError(
                f"{self._where}: the row has {len(marked)} tools, and the chat template does not show them "
                "all; remove them, or write a chat_template_jinja that shows them"
            )

    def remove_hidden_reasoning(self) -> None:
        """Removes reasoning that the template leaves out of this turn; all else must be in the text."""
        for number, message in enumerate(self._chat.messages):
            for name in said_besides_content(message):
                if not self._shows(number, name):
                    if name in REASONING and _said_again(message, name):
                        del message[name]
                        continue
                    if name not in REASONING or not self._shows_reasoning(name):
                        raise ValueError(self._hidden(number, name))
                    del message[name]
            if message.get("content") and "tool_calls" in message:
                self._check_words_of_call(number)

    def spans(self) -> list[Span]:
        """Where each message lies."""
        spans: list[Span] = []
        for number in range(len(self._chat.messages)):
            spans.append(self._span(number, spans[-1].end if spans else 0))
        return spans

    def _span(self, number: int, earliest: int) -> Span:
        message = self._chat.messages[number]
        answers = message["role"] == "assistant"
        if not answers or not said_besides_content(message):
            found = self._content(number)
            if found is not None:
                if answers:
                    return Span(self._begin_of_words(number, found.begin, earliest), found.end)
                return found
            if not answers:
                raise ValueError(self._changes(number))
        end = max(self._ends_of_parts(number))
        begin = self._begin(number, earliest, end)
        if begin is None:
            raise ValueError(self._no_prompt(number))
        return Span(begin, end)

    def _content(self, number: int) -> Span | None:
        """Where the content of a message lies; None if the template changes more with it."""
        other = self._changed(number, content=_MARK)
        before, mark, behind = other.partition(_MARK)
        if not mark:
            role = self._chat.messages[number]["role"]
            raise ValueError(
                f"{self._where}: the chat template does not show message {number} ({role}); remove it, or "
                "write a chat_template_jinja that shows it"
            )
        text = self._text
        if len(text) < len(before) + len(behind) or not (text.startswith(before) and text.endswith(behind)):
            return None
        return Span(len(before), len(text) - len(behind))

    def _begin_of_words(self, number: int, content: int, earliest: int) -> int:
        """Where an answer begins that is its content alone."""
        begin = self._begin(number, earliest, content)
        if begin is None:
            return content
        asked, told = self._asked(number)
        # A template without a prompt: its header is none of the answer, space in front of the words is.
        if asked == told and self._text[begin:content].strip():
            return content
        return min(begin, content)

    def _begin(self, number: int, earliest: int, end: int) -> int | None:
        """Where the prompt for this answer ends; None if that cannot be told."""
        text = self._text
        asked, told = self._asked(number)
        if asked and text.startswith(asked) and len(asked) <= end:
            return len(asked)
        first = self._first_difference(number)
        # The template writes earlier turns differently once others follow: the prompt alone is looked for.
        prompt = asked.removeprefix(told) if asked.startswith(told) else ""
        if prompt:
            begins = text.rfind(prompt, earliest, first)
            return begins + len(prompt) if begins >= 0 else None
        # Nor is there a prompt: the answer as the template would write it here is looked for.
        answer = self._as_last(number, asked)
        begins = text.find(answer, earliest) if answer else -1
        return begins if 0 <= begins <= first <= begins + len(answer) else None

    def _asked(self, number: int) -> tuple[str, str]:
        """The chat before this message, with the prompt for an answer behind it and without."""
        earlier = self._chat.messages[:number]
        try:
            asked, told = (self._render(earlier, self._chat.tools, prompt=prompt) for prompt in (True, False))
        except ValueError:
            return "", " "  # not a chat the template would render: nothing is known of its prompt
        return asked, told

    def _as_last(self, number: int, asked: str) -> str:
        """What the template writes of this message behind the chat before it; empty if that is not told."""
        try:
            longer = self._render(self._chat.messages[: number + 1], self._chat.tools)
        except ValueError:
            return ""
        return longer.removeprefix(asked) if asked and longer.startswith(asked) else ""

    def _changed(self, number: int, **change: Any) -> str:
        messages = list(self._chat.messages)
        messages[number] = {**messages[number], **change}
        return self._render(messages, self._chat.tools)

    def _shows(self, number: int, name: str) -> bool:
        """Whether the text depends on this key of the message; of tool calls, on each of them."""
        message, tools = self._chat.messages[number], self._chat.tools
        if name != "tool_calls":
            if isinstance(message[name], str):
                return _MARK in self._changed(number, **{name: _MARK})
            messages = list(self._chat.messages)
            messages[number] = {other: value for other, value in message.items() if other != name}
            return self._render(messages, tools) != self._text
        for index, call in enumerate(message[name]):
            if _MARK not in self._changed(number, tool_calls=_marked_call(message[name], index)):
                return False
            function = call.get("function", call)
            if function.get("arguments"):
                calls = _changed_call(message[name], index, arguments={})
                if self._changed(number, tool_calls=calls) == self._text:
                    return False
        return True

    def _shows_reasoning(self, name: str) -> bool:
        """Whether the template shows this key of a last message, as it may leave it out of earlier ones."""
        if name not in self._can_show:
            self._can_show[name] = self._shows_last({"role": "assistant", "content": "b", name: _MARK})
        return self._can_show[name]

    def _shows_last(self, answer: Message) -> bool:
        """Whether the mark in this answer to a question is in the text of the two."""
        try:
            return _MARK in self._render([{"role": "user", "content": "a"}, answer], self._chat.tools)
        except ValueError:
            return False

    def _check_words_of_call(self, number: int) -> None:
        """Words beside tool calls: a template may take them for reasoning and leave them out of earlier
        turns (harmony), or never show them."""
        if _MARK in self._changed(number, content=_MARK):
            return
        if not self._shows_last({**self._chat.messages[number], "content": _MARK}):
            raise ValueError(self._hidden(number, "content beside tool_calls"))

    def _ends_of_parts(self, number: int) -> list[int]:
        """Where each part of a message ends in the text; of tool calls, the name of the last."""
        message, text = self._chat.messages[number], self._text
        changes: list[dict[str, Any]] = [
            {name: message[name] + _MARK}
            for name in ("content", *said_besides_content(message))
            if isinstance(message.get(name), str) and message[name]
        ]
        if calls := message.get("tool_calls"):
            changes.append({"tool_calls": _marked_call(calls, len(calls) - 1)})
        ends = []
        for change in changes:
            other = self._changed(number, **change)
            before, mark, behind = other.partition(_MARK)
            if _MARK in behind:  # a result names its call again (harmony); the call comes first
                end = len(before) if text.startswith(before) else None
            else:
                end = len(text) - len(behind) if mark and text.endswith(behind) else None
            if end is not None:
                ends.append(end)
            elif mark or "content" not in change:
                raise ValueError(self._changes(number))
        if not ends:
            raise ValueError(self._changes(number))
        return ends

    def _first_difference(self, number: int) -> int:
        """The first character that depends on what the message says."""
        message, text = self._chat.messages[number], self._text
        changes = {name: _MARK for name in message if isinstance(message[name], str) and name != "role"}
        if calls := message.get("tool_calls"):
            other = self._changed(number, **changes, tool_calls=_marked_call(calls, 0, whole=True))
        else:
            other = self._changed(number, **changes)
        pairs = enumerate(zip(text, other, strict=False))
        return next((index for index, (one, two) in pairs if one != two), min(len(text), len(other)))

    def _hidden(self, number: int, name: str) -> str:
        return (
            f"{self._where}: message {number} has {name}, which the chat template does not show; remove it, "
            "or write a chat_template_jinja that shows it"
        )

    def _changes(self, number: int) -> str:
        return (
            f"{self._where}: the chat template writes other messages differently when message {number} "
            "changes, so targets cannot be told; write chat_template_jinja without that rule"
        )

    def _no_prompt(self, number: int) -> str:
        asked, told = self._asked(number)
        prompt = asked.removeprefix(told) or asked[-40:]
        return (
            f"{self._where}: the chat template asks for an answer with {prompt!r}, which does not stand in "
            f"front of message {number}, so its targets cannot be told; change chat_template_kwargs, or "
            "write another chat_template_jinja"
        )


def _said_again(message: Message, name: str) -> bool:
    """Whether another key of the message holds the same."""
    others = [other for other in said_besides_content(message) if other != name]
    return any(message[other] == message[name] for other in others)


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
