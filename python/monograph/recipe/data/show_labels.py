"""Tokens coloured by label: what `preprocess --debug` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from monograph.packing.collator import IGNORED


def show_labels(documents: Sequence[Mapping[str, Any]], tokenizer: Any, console: Console) -> None:
    """Targets green; other tokens dim. Without colours targets stand in [brackets]."""
    marks = ("", "") if console.color_system and not console.no_color else ("[", "]")
    for number, document in enumerate(documents):
        line = Text()
        # The first token is predicted by nothing, whatever its label says.
        labels = [IGNORED, *document["labels"][1:]]
        for token, label in zip(document["input_ids"], labels, strict=True):
            # Spaces and line ends are made visible: a target that is only white space is a target too.
            piece = tokenizer.decode([token]).replace("\n", "\\n\n")
            target = label != IGNORED
            text = f"{marks[0]}{piece}{marks[1]}" if target else piece
            line.append(text, style="green" if target else "dim")
            line.append(f"{token} ", style="cyan" if target else "bright_black")
        targets = sum(label != IGNORED for label in labels)
        console.print(Text(f"document {number}: {len(labels)} tokens, {targets} targets", style="bold"))
        console.print(line, soft_wrap=True)
        console.print()
