"""Documents to tokens and labels, and the tokenizer as the recipe wants it."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from monograph.packing.collator import IGNORED
from monograph.recipe.config.keys import Recipe
from monograph.recipe.config.model_folder import naming
from monograph.recipe.data.document import Document
from monograph.recipe.data.new_tokens import add_tokens


class Encoded(NamedTuple):
    input_ids: list[int]
    labels: list[int]


def load_tokenizer(recipe: Recipe, folder: str) -> Any:
    """The tokenizer of the model with the tokens of the recipe; the adapter must train those that are new."""
    from transformers import AutoTokenizer

    key = "tokenizer_config" if recipe.tokenizer_config else "base_model"
    with naming(key, f"{recipe.tokenizer_config or recipe.base_model}: its tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(recipe.tokenizer_config or folder)
    if not tokenizer.is_fast:
        raise ValueError(
            f"{recipe.tokenizer_config or folder}: the tokenizer is {type(tokenizer).__name__}, which does "
            "not say where its tokens lie in a text; wanted a fast one (tokenizer.json)"
        )
    add_tokens(recipe, tokenizer)
    known = tokenizer.get_vocab()
    for token in recipe.eot_tokens or []:
        if token not in known:
            raise ValueError(f"eot_tokens: {token!r} is not a token of the model")
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "the tokenizer has no eos token, so no answer would end; write special_tokens.eos_token"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # padding is masked; which token it is changes nothing
    return tokenizer


@cache
def _cuts_cleanly(tokenizer: Any) -> bool:
    """Whether a text that is tokenised in two pieces stays that text. SentencePiece's tokenizers (Metaspace,
    Llama 2's Prepend) begin each piece with a space."""
    whole = tokenizer("the answer", add_special_tokens=False)["input_ids"]
    pieces = [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in ("the ", "answer")]
    return bool(tokenizer.decode(whole) == tokenizer.decode(pieces[0] + pieces[1]))


def prompt_tokens(prompt: str, tokenizer: Any, *, begins: bool) -> list[int]:
    """The tokens that a prompt has in front of an answer in training.

    Where `encode` cannot cut, a space at the end of the prompt is part of the answer's first token. begins:
    the tokenizer puts its first token (bos) in front.
    """
    options = {"add_special_tokens": begins, "return_offsets_mapping": True, "verbose": False}
    if not prompt.endswith(" ") or _cuts_cleanly(tokenizer):
        return list(tokenizer(prompt, **options)["input_ids"])
    encoding = tokenizer(prompt + "answer", **options)
    ends = [end for _, end in encoding["offset_mapping"]]
    return list(encoding["input_ids"][: sum(end <= len(prompt) for end in ends)])


def _tokens(document: Document, tokenizer: Any, cuts: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Tokens and where each lies in the text, the text cut at these positions first."""
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    for begin, end in zip([0, *cuts], [*cuts, len(document.text)], strict=True):
        encoding = tokenizer(
            document.text[begin:end],
            add_special_tokens=document.begins and begin == 0,
            return_offsets_mapping=True,
            verbose=False,
        )
        ids += encoding["input_ids"]
        offsets += [(first + begin, last + begin) for first, last in encoding["offset_mapping"]]
    return ids, offsets


def encode(document: Document, tokenizer: Any) -> Encoded:
    """Tokens of a document; those that touch a target span are targets.

    No token reaches from a prompt into an answer: at generation the prompt is tokenised alone, and must give
    the tokens it had in training. Where a tokenizer would join them ("A: " + "Yes" has a token " Yes") the
    text is cut. A tokenizer that begins every piece with a space would change the text: there the tokens
    are those of the whole text, " Yes" is a target, and `prompt_tokens` leaves the space to it.
    """
    ids, offsets = _tokens(document, tokenizer, [])
    begins = [span.begin for span in document.targets if span.begin]
    cuts = [cut for cut in begins if any(begin < cut < end for begin, end in offsets)]
    if cuts and _cuts_cleanly(tokenizer):
        ids, offsets = _tokens(document, tokenizer, cuts)
    eos = tokenizer.eos_token_id
    if document.begins and ids and ids[-1] == eos and offsets[-1][0] == offsets[-1][1]:
        ids.pop()  # a tokenizer that adds eos itself; below it is added with its label
        offsets.pop()
    labels = [IGNORED] * len(ids)
    spans = iter(document.targets)
    span = next(spans, None)
    for number, (begin, end) in enumerate(offsets):
        while span is not None and span.end <= begin:
            span = next(spans, None)
        if span is None:
            break
        if begin < end and end > span.begin:
            labels[number] = ids[number]
    if document.ends:
        labels.append(eos)
        ids.append(eos)
    return Encoded(ids, labels)


def fit(encoded: Encoded, length: int, strategy: str) -> list[Encoded]:
    """A document within `length` tokens: itself, its beginning, its pieces, or nothing."""
    tokens = len(encoded.input_ids)
    if tokens <= length:
        return [encoded]
    if strategy == "raise":
        raise ValueError(
            f"it has {tokens} tokens, sequence_len is {length}; raise it, or write excess_length_strategy: "
            "truncate, split or drop"
        )
    if strategy == "drop":
        return []
    starts = range(0, tokens, length) if strategy == "split" else [0]
    return [
        Encoded(encoded.input_ids[start : start + length], encoded.labels[start : start + length])
        for start in starts
    ]
