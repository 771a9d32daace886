"""Document: a text, which parts of it are targets, and who says where it begins and ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Span(NamedTuple):
    """Characters [begin, end) of a document that are targets."""

    begin: int
    end: int


@dataclass(frozen=True)
class Document:
    """Text whose `targets` are trained on.

    begins: the tokenizer puts its first token (bos) in front. ends: eos is put behind, and is a target.
    """

    text: str
    targets: tuple[Span, ...]
    begins: bool = True
    ends: bool = True


def joined(parts: list[tuple[str, bool]], *, begins: bool = True, ends: bool = True) -> Document:
    """A document from parts, each with whether it is a target."""
    text, spans = "", []
    for part, target in parts:
        if target and part:
            spans.append(Span(len(text), len(text) + len(part)))
        text += part
    return Document(text, tuple(spans), begins, ends)
