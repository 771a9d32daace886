"""Which chat template a recipe means, and texts by it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from monograph.recipe.config.keys import Recipe
from monograph.recipe.data.document import Span

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_MARKS_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

Message = dict[str, Any]
Tools = list[dict[str, Any]]


def written_template(recipe: Recipe) -> str | None:
    """`chat_template_jinja`: the contents of the file it names, or the template that it is."""
    written = recipe.chat_template_jinja
    if not written:
        return None
    path = os.path.expanduser(written)
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            return file.read()
    if "{" not in written:
        raise ValueError(f"chat_template_jinja: there is no file {written}, and it is no template either")
    return written


def chat_template(recipe: Recipe, tokenizer: Any, own: str | None = None, tools: Tools | None = None) -> str:
    """The Jinja template that the recipe (or a dataset of it: `own`) asks for.

    A tokenizer with several named templates gives the one whose name `chat_template` is; else `tool_use` for
    a chat with tools, and `default`, as transformers does.
    """
    name = own or recipe.chat_template
    if name == "chatml":
        return CHATML
    written = written_template(recipe) if name in (None, "jinja") else None
    if written is not None:
        return written
    known = tokenizer.chat_template
    if isinstance(known, dict) and known:
        return tokenizer.get_chat_template(name if name in known else None, tools)
    if isinstance(known, str):
        return known
    if name == "tokenizer_default_fallback_chatml":
        return CHATML
    raise ValueError(
        "chat_template: the tokenizer has none; write chat_template: chatml (its <|im_end|> must be a token "
        "of the model), or chat_template_jinja"
    )


class ChatRenderer:
    """Texts of chats by the template of a dataset, as transformers' `apply_chat_template` makes them."""

    def __init__(self, recipe: Recipe, tokenizer: Any, own: str | None = None) -> None:
        self._recipe, self._tokenizer, self._own = recipe, tokenizer, own
        self._templates: dict[bool, str] = {}  # for chats with tools, and without

    def __call__(self, messages: Sequence[Message], tools: Tools | None, *, prompt: bool = False) -> str:
        """prompt: with what stands in front of an answer behind it. ValueError if the template refuses."""
        return self._apply(messages, tools, tokenize=False, add_generation_prompt=prompt)

    def generated(self, messages: Sequence[Message], tools: Tools | None) -> list[Span] | None:
        """What the template marks with `{% generation %}` in the text, as transformers' mask of the assistant
        has it: whole tokens. None for a template without marks."""
        if not _MARKS_GENERATION.search(self._template(tools)):
            return None
        found = self._apply(
            messages,
            tools,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False},
        )
        spans: list[Span] = []
        for kept, (begin, end) in zip(found["assistant_masks"], found["offset_mapping"], strict=True):
            if kept and spans and begin <= spans[-1].end:
                spans[-1] = Span(spans[-1].begin, max(end, spans[-1].end))
            elif kept:
                spans.append(Span(begin, end))
        return spans

    def _template(self, tools: Tools | None) -> str:
        if bool(tools) not in self._templates:
            self._templates[bool(tools)] = chat_template(self._recipe, self._tokenizer, self._own, tools)
        return self._templates[bool(tools)]

    def _apply(self, messages: Sequence[Message], tools: Tools | None, **options: Any) -> Any:
        from jinja2 import TemplateError

        if tools:
            options["tools"] = tools
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                chat_template=self._template(tools),
                **options,
                **self._recipe.chat_template_kwargs,
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses this chat: {error}") from error
