"""What becomes of a key under each engine, by the rows of the table."""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple, get_args, get_type_hints

from monograph.recipe.config.dataset_keys import (
    DATASET_KEYS,
    DATASET_REFUSED,
    PROMPT_KEYS,
    TYPE_REFUSED,
    USER_DEFINED,
    TrlDatasetKeys,
)
from monograph.recipe.config.key_row import MeaningOf
from monograph.recipe.config.keys import KEYS, TRL_KEYS, TrlRecipe
from monograph.recipe.config.other_keys import MEANINGS, OTHERS_IGNORED, OTHERS_REFUSED, SYNONYMS
from monograph.recipe.config.run_checks import FSDP_ENTRIES, FSDP_REFUSED, SPECIAL_TOKENS
from monograph.recipe.config.trl_arguments import RENAMED, REWARD_FUNCS, field_names
from monograph.recipe.config.trl_checks import NOT_HERE
from monograph.recipe.config.trl_choose import METHODS, trainer_classes

Answer = Literal["honoured", "ignored", "refused"]
_OF_TRL = {name: row.own for name, row in TRL_KEYS.items() if row.own}
# What Monograph's own engine says of keys that it does not honour: TRL's, and those of other recipes.
IGNORED: dict[str, str] = OTHERS_IGNORED | {
    name: said.reason for name, said in _OF_TRL.items() if said.state == "ignored"
}
REFUSED: dict[str, str] = OTHERS_REFUSED | {
    name: said.reason for name, said in _OF_TRL.items() if said.state == "refused"
}
# Keys that say something of others; those of ours do so besides what they do.
ALL_MEANINGS: dict[str, MeaningOf] = MEANINGS | {
    name: row.meaning for name, row in (TRL_KEYS | KEYS).items() if row.meaning
}
_PEFT = ("loftq_config", "loftq_config.loftq_bits", "loftq_config.loftq_iter")


class State(NamedTuple):
    """Under Monograph's own trainer, and under TRL's."""

    own: Answer
    trl: Answer


def state_of(name: str) -> State | None:
    """The state of a key; `a.b` is the key b inside a. None: no table has it; recipes call it unknown."""
    outer, _, inside = name.partition(".")
    outer = SYNONYMS.get(outer, outer)
    whole = _outer(outer)
    if not inside or whole is None or "honoured" not in whole:
        return whole
    found = _inside(outer, inside)
    if found is None:
        return None
    # What is inside a key that an engine does not honour has the state of that key.
    return State(
        *(part if of_all == "honoured" else of_all for part, of_all in zip(found, whole, strict=True))
    )


def _outer(name: str) -> State | None:
    if name in KEYS:
        return State("honoured", "honoured" if KEYS[name].trl else "refused")
    if name in MEANINGS:
        return State("honoured", "honoured")
    own: Answer | None = "ignored" if name in IGNORED else "refused" if name in REFUSED else None
    if own is None:
        return None
    return State(own, "honoured" if name in TRL_KEYS else own)


def _both(known: bool, refused: bool = False) -> State | None:
    return State("honoured", "honoured") if known else State("refused", "refused") if refused else None


def _inside(outer: str, name: str) -> State | None:
    """A key inside one that some engine honours."""
    if outer in ("datasets", "test_datasets", "pretraining_dataset"):
        return _of_dataset(name)
    if outer == "trl":
        there = RENAMED.get(name, name) in _fields_of_trl() or name == REWARD_FUNCS
        return State("refused", "honoured" if there and name not in NOT_HERE else "refused")
    if outer == "fsdp_config":
        short = name.removeprefix("fsdp_")
        return _both(short in FSDP_ENTRIES, short in FSDP_REFUSED)
    if outer == "special_tokens":
        return _both(name in SPECIAL_TOKENS)
    return _both(name in _PEFT) if outer == "peft" else None


def _of_dataset(name: str) -> State | None:
    if name.startswith("type."):
        return _of_type(name.removeprefix("type."))
    if name in DATASET_KEYS:
        return State("honoured", "honoured")
    if name not in DATASET_REFUSED:
        return None
    return State("refused", "honoured" if name in TrlDatasetKeys.__dataclass_fields__ else "refused")


def _of_type(name: str) -> State | None:
    """Inside a mapping as `type`: the wording of documents, or of preferences, which TRL trains."""
    of_preferences = any(name in names.split() for names in USER_DEFINED.values())
    if name in PROMPT_KEYS:
        return State("honoured", "honoured")
    if of_preferences:
        return State("refused", "honoured")
    return _both(False, name in TYPE_REFUSED)


@cache
def _fields_of_trl() -> frozenset[str]:
    """Fields of any config that a method has."""
    return frozenset().union(*(field_names(trainer_classes(method)[1]) for method in METHODS.values()))


@cache
def words_for_false() -> frozenset[str]:
    """Keys with the value `no`, which YAML 1.1 reads as false, by all their names."""
    hints = get_type_hints(TrlRecipe)
    ours = {name for name in hints if any("no" in get_args(part) for part in get_args(hints[name]))}
    return frozenset(ours | {other for other, name in SYNONYMS.items() if name in ours})
