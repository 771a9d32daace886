"""Rows of a dataset to documents: every type of dataset becomes a `Document`; what follows knows no types."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from monograph.recipe.config.keys import DatasetKeys, Recipe
from monograph.recipe.data.chat import ChatReader
from monograph.recipe.data.document import Document, Span, joined

__all__ = ["PROMPTS", "Document", "Prompt", "Span", "document_reader", "joined", "prompt_of"]

# The wording of the Stanford Alpaca data, which models and data sets in that format expect.
_ALPACA = (
    "Below is an instruction that describes a task{}. "
    "Write a response that appropriately completes the request.\n\n"
)
_ALPACA_PROMPT = _ALPACA.format("") + "### Instruction:\n{instruction}\n\n### Response:\n"
_ALPACA_INPUT_PROMPT = (
    _ALPACA.format(", paired with an input that provides further context")
    + "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)

_PLACEHOLDER = re.compile(r"\{(instruction|input|system)\}")


@dataclass(frozen=True)
class Prompt:
    """How an instruction, and perhaps an input, become a prompt."""

    with_input: str
    without_input: str
    instruction: str = "instruction"
    input: str = "input"
    output: str = "output"
    system: str = ""

    def prompt(self, instruction: str, given: str = "") -> str:
        wording = self.with_input if given else self.without_input
        values = {"instruction": instruction, "input": given, "system": self.system}
        # Not str.format: an instruction may hold braces, and so may a user's wording. One pass: an
        # instruction may hold "{input}".
        return _PLACEHOLDER.sub(lambda found: values[found[1]], wording)


_TASK, _TASK_WITH_INPUT = (
    _ALPACA.format(text).rstrip("\n") for text in ("", ", paired with an input that provides further context")
)
PROMPTS = {
    "alpaca": Prompt(_ALPACA_INPUT_PROMPT, _ALPACA_PROMPT),
    "alpaca:instruct": Prompt(_ALPACA_INPUT_PROMPT, _ALPACA_PROMPT),
    # The same task in the turns of a chat, as axolotl's styles of alpaca have them.
    "alpaca:chat": Prompt(
        f"SYSTEM: {_TASK_WITH_INPUT}\nUSER: {{instruction}}\n{{input}}\nASSISTANT:",
        f"SYSTEM: {_TASK}\nUSER: {{instruction}}\nASSISTANT:",
    ),
    "alpaca:chatml": Prompt(
        f"<|im_start|>system\n{_TASK_WITH_INPUT}<|im_end|>\n"
        "<|im_start|>user\n{instruction}\n{input}<|im_end|>\n<|im_start|>assistant\n",
        f"<|im_start|>system\n{_TASK}<|im_end|>\n"
        "<|im_start|>user\n{instruction}<|im_end|>\n<|im_start|>assistant\n",
    ),
    "alpaca:phi": Prompt(
        f"<|system|>\n{_TASK_WITH_INPUT}<|end|>\n<|user|>\n{{instruction}}<|end|>{{input}}<|assistant|>",
        f"<|system|>\n{_TASK}<|end|>\n<|user|>\n{{instruction}}<|end|>\n<|assistant|>\n",
    ),
    "instruction": Prompt("{instruction}\n{input}\n", "{instruction}\n"),
}


def prompt_of(kind: str | Mapping[str, str]) -> Prompt | None:
    """The wording of a dataset type; None for types that are not instructions."""
    if isinstance(kind, str):
        return PROMPTS.get(kind)
    base = PROMPTS["instruction"]
    return replace(
        base,
        with_input=kind.get("format", base.with_input),
        without_input=kind.get("no_input_format", kind.get("format", base.without_input)),
        instruction=kind.get("field_instruction", base.instruction),
        input=kind.get("field_input", base.input),
        output=kind.get("field_output", base.output),
        system=kind.get("system_prompt", ""),
    )


def _text(row: Mapping[str, Any], name: str, where: str, *, needed: bool = True) -> str:
    value = row.get(name)
    if value is None and not needed:
        return ""
    if not isinstance(value, str):
        columns = ", ".join(map(str, row)) or "nothing"
        found = "missing" if name not in row else f"{value!r:.60}"
        raise ValueError(f"{where}: column {name!r} is {found}, wanted text; the row has {columns}")
    return value


def _input_output(row: Mapping[str, Any], where: str) -> Document:
    """`segments`: a list of {text, label}; the user writes bos and eos where they belong."""
    segments = row.get("segments")
    if not isinstance(segments, list):
        raise ValueError(f"{where}: column 'segments' is missing, wanted a list of {{text, label}}")
    parts = []
    for number, segment in enumerate(segments):
        if not isinstance(segment.get("label"), bool):
            found = segment.get("label")
            raise ValueError(f"{where}: segment {number} has label {found!r}, wanted true or false")
        parts.append((_text(segment, "text", f"{where}: segment {number}"), segment["label"]))
    return joined(parts, begins=False, ends=False)


def document_reader(
    recipe: Recipe, dataset: DatasetKeys, tokenizer: Any
) -> Callable[[Mapping[str, Any], str], Document]:
    """The function that makes a document from a row of this dataset; `where` names the row in errors."""
    if isinstance(dataset.type, str) and dataset.type.startswith("chat_template"):
        return ChatReader(recipe, dataset, tokenizer)
    if dataset.type == "input_output":
        return _input_output
    if dataset.type == "completion":
        column = dataset.field or "text"
        return lambda row, where: joined([(_text(row, column, where), True)])
    prompt = prompt_of(dataset.type)
    if prompt is None:
        raise ValueError(f"datasets: type {dataset.type!r} is unknown")
    on_inputs = recipe.train_on_inputs

    def instruction(row: Mapping[str, Any], where: str) -> Document:
        asked = _text(row, prompt.instruction, where)
        given = _text(row, prompt.input, where, needed=False)
        return joined([(prompt.prompt(asked, given), on_inputs), (_text(row, prompt.output, where), True)])

    return instruction
