"""What a row of the table of keys says. The table: native_keys.py, keys.py, dataset_keys.py, other_keys.py.

A row of a key that is honoured is a field of a dataclass: its annotation is the type that is checked. Keys of
other recipes stand in groups of names with one answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from enum import Enum
from typing import Any, Literal, NamedTuple, TypeVar


class Under(Enum):
    """How TRL's engine has a key that is no field of its config under another name."""

    SAME = "the field of the same name"
    OURS = "Monograph follows it, whoever trains"
    DOCUMENTS = "the same, for documents alone: other trainers cut and mask answers themselves"


SAME, OURS, DOCUMENTS = Under.SAME, Under.OURS, Under.DOCUMENTS


@dataclass(frozen=True)
class OnResume:
    """What becomes of another value when a run goes on from a checkpoint. trl: under TRL it is compared."""

    state: Literal["compared", "told", "free"]
    why: str = ""
    trl: bool = False


COMPARED = OnResume("compared")
TOLD = OnResume("told", "it changes what comes, not what was: a person may want it")


def free(why: str, *, trl: bool = False) -> OnResume:
    """Another value is taken without a word, and why."""
    return OnResume("free", why, trl)


@dataclass(frozen=True)
class Limit:
    """Which numbers a key may have."""

    holds: Callable[[Any], bool]
    wanted: str


AT_LEAST_1 = Limit(lambda value: value >= 1, "1 or more")
ABOVE_0 = Limit(lambda value: value > 0, "more than 0")
STEPS = Limit(lambda value: value >= 1 or value == -1, "1 or more, or -1 for no bound")
SHARE = Limit(lambda value: 0 <= value < 1, "0 or more and less than 1")


class Path(Enum):
    """A key with a path; `~` is the home folder. What recipe.yml beside an adapter keeps of it."""

    READ = "absolute if it is there; else it is a name on the Hub"
    WRITTEN = "absolute, whether it is there or not"
    AS_IS = "as it stands"


READ, WRITTEN, AS_IS = Path.READ, Path.WRITTEN, Path.AS_IS


class Meaning(NamedTuple):
    """What a key of another recipe means. keys: of ours, with values; they are as if written."""

    keys: dict[str, Any]
    notices: list[str]
    errors: list[str]


# The value of a key and all keys as written; None: the key stays as it is.
MeaningOf = Callable[[Any, Mapping[str, Any]], Meaning | None]


@dataclass(frozen=True)
class Answer:
    """What is done with a key that an engine does not honour, with the reason, or what to write instead."""

    state: Literal["ignored", "refused"]
    reason: str


def ignored(reason: str) -> Answer:
    return Answer("ignored", reason)


def refused(instead: str) -> Answer:
    return Answer("refused", instead)


def with_trl(instead: str) -> Answer:
    """A refusal of a key that the other engine has."""
    return refused(f"{instead}; or write trainer: trl beside it")


@dataclass(frozen=True)
class Row:
    """about: the line of docs/reference/keys.md. resume: what a resumed run does with another value. trl: the
    field of TRL's config that it sets, or how it is followed there; None: TRL's engine refuses it. to_trl:
    what its value becomes there. methods: those of TRL that have it. own: what Monograph's own engine does
    with a key that is TRL's alone. once: it belongs to one start of a run, and is not kept in recipe.yml.
    peft: PEFT's name of it, if adapter_config.json keeps its value. limit: the numbers that it may have.
    meaning: what it may say of other keys. of: what reads a key of a dataset."""

    about: str
    resume: OnResume = COMPARED
    trl: str | Under | None = None
    to_trl: Callable[[Any, Any], Any] | None = None
    methods: tuple[str, ...] = ()
    own: Answer | None = None
    once: bool = False
    path: Path | None = None
    peft: str | None = None
    limit: Limit | None = None
    meaning: MeaningOf | None = None
    of: str = ""


def key(default: Any, about: str, resume: OnResume = COMPARED, *, methods: str = "", **row: Any) -> Any:
    """A row with its default (a list or dict stands for a fresh copy of it). TRL's engine refuses the key."""
    metadata = {"row": Row(about, resume, methods=tuple(methods.split()), **row)}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def both(default: Any, about: str, resume: OnResume = COMPARED, **row: Any) -> Any:
    """A key that Monograph follows, whoever trains."""
    return key(default, about, resume, trl=OURS, **row)


def handed(
    default: Any,
    about: str,
    resume: OnResume = COMPARED,
    *,
    to: str | Under = SAME,
    value: Any = None,
    **row: Any,
) -> Any:
    """A key that is handed to a field of TRL's config, that of the same name if none is said, as it is or as
    what `value` makes of it and the recipe; None from there: TRL's own default stays."""
    return key(default, about, resume, trl=to, to_trl=value, **row)


def rows_of(keys: type) -> dict[str, Row]:
    """The rows of a dataclass of keys by name, `trl` with the name of its field."""
    found: dict[str, Row] = {entry.name: entry.metadata["row"] for entry in fields(keys)}
    return {name: replace(row, trl=name) if row.trl is SAME else row for name, row in found.items()}


def default_of(entry: Field[Any]) -> Any:
    """The value that a key has if it is not written."""
    return entry.default if entry.default_factory is MISSING else entry.default_factory()


def changed_keys(recipe: Any) -> list[str]:
    """The keys of a recipe that are not at their defaults."""
    return [entry.name for entry in fields(recipe) if getattr(recipe, entry.name) != default_of(entry)]


@dataclass
class Said:
    """What checks say of a recipe."""

    errors: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


_Check = TypeVar("_Check", bound=Callable[..., Any])
# Keys and the functions that look at them together with others.
CHECKS_OF: dict[str, list[str]] = {}


def concerns(keys: str) -> Callable[[_Check], _Check]:
    """Marks a check with the keys that it looks at."""

    def mark(check: _Check) -> _Check:
        for name in keys.split():
            CHECKS_OF.setdefault(name, []).append(f"{check.__module__}.{check.__name__}")
        return check

    return mark


def check_limits(recipe: Any) -> list[str]:
    """Numbers that a key may not have; one without a value is passed over."""
    given = {name: (getattr(recipe, name), row.limit) for name, row in rows_of(type(recipe)).items()}
    return [
        f"{name} is {value}, wanted {limit.wanted}"
        for name, (value, limit) in given.items()
        if limit is not None and value is not None and not limit.holds(value)
    ]


def words(groups: Mapping[str, str]) -> dict[str, str]:
    """What is said of each name; a text of names has it in common."""
    return {name: said for said, names in groups.items() for name in names.split()}
