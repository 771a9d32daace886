"""A recipe with `adapters` or `sweep` as a recipe for each adapter: that which `--only NAME` trains alone."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from monograph.recipe.config.key_row import default_of
from monograph.recipe.config.keys import KEYS, Recipe
from monograph.recipe.config.many_keys import OWN, REFUSED_BESIDE, SHORT, ManyKeys
from monograph.recipe.config.model_checks import given_config
from monograph.recipe.config.other_keys import SYNONYMS
from monograph.recipe.config.trl_choose import wants_trl

_WRITTEN = tuple(ManyKeys.__dataclass_fields__)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*")
# What output_dir holds beside the adapters, or a run inside its own folder.
_TAKEN = re.compile(
    r"checkpoint-\d+|earlier-\d+|final|best|adapters\.json(\.new)?|losses\.png", re.IGNORECASE
)
_METRICS = ("eval_loss", "loss")
_MOST = 1024  # adapters of a recipe: a sweep of five lists of five is a mistake sooner than a wish


@dataclass(frozen=True)
class SweepStop:
    """After `after` steps of each adapter the `keep` best by `metric` go on."""

    metric: str
    after: int
    keep: int


@dataclass
class ManyRecipes:
    """The recipes of the adapters by name, in the order in which they are written."""

    recipes: dict[str, Recipe]
    output_dir: str
    stop: SweepStop | None = None


@dataclass
class Expanded:
    """Keys by adapter; errors of the keys that make several of one."""

    keys: dict[str, dict[str, Any]]
    errors: list[str]
    stop: SweepStop | None = None


def has_many(keys: Mapping[str, Any]) -> bool:
    return any(keys.get(name) for name in _WRITTEN)


def expand(keys: Mapping[str, Any]) -> Expanded:
    """The keys of each adapter: those of the recipe, its own over them, and a folder in output_dir."""
    shared = {name: value for name, value in keys.items() if name not in _WRITTEN}
    entries, only, errors = keys.get("adapters"), keys.get("only"), list[str]()
    grid = keys.get("sweep")
    if entries and grid:
        errors.append("sweep: adapters are written too; leave one of them out")
    elif not entries and not grid:
        what = "only" if only else "sweep_stop"
        errors.append(f"{what} is {keys.get(what)!r}, and the recipe has neither adapters nor sweep")
    own = dict(_of_list(entries, errors) if entries else _of_grid(grid, errors) if grid else ())
    errors += [
        f"{name}: not with adapters: {why}" for name, why in REFUSED_BESIDE.items() if shared.get(name)
    ]
    if wants_trl(shared):
        errors.append("adapters: trainer: trl trains one adapter; leave trainer, rl and reward_model out")
    stop = _stop(keys.get("sweep_stop"), len(own), errors)
    folder = str(shared.get("output_dir") or default_of(Recipe.__dataclass_fields__["output_dir"]))
    made = {
        name: shared | changes | {"output_dir": os.path.join(folder, name)} for name, changes in own.items()
    }
    if only is not None and made and str(only) not in made:
        errors.append(f"only is {only!r}, wanted one of {', '.join(made)}")
    elif only is not None:
        made = {name: found for name, found in made.items() if name == str(only)}
    return Expanded(made, errors, stop)


def refused_beside(recipe: Recipe, stop: SweepStop | None) -> list[str]:
    """What one adapter asks for that it cannot have beside others."""
    if stop is not None and stop.metric == "eval_loss" and not (recipe.val_set_size or recipe.test_datasets):
        return [
            "sweep_stop.metric is eval_loss, and nothing is held back; write val_set_size or test_datasets"
        ]
    return _refused_start(recipe)


def _refused_start(recipe: Recipe) -> list[str]:
    """Starts that change the base: PiSSA and LoftQ leave a residual, of which each adapter wants its own."""
    start, where = recipe.peft_init_lora_weights, "peft_init_lora_weights"
    if recipe.lora_model_dir:
        config = given_config(recipe.lora_model_dir)
        start, where = (
            config.get("init_lora_weights", True),
            f"lora_model_dir: init_lora_weights of {recipe.lora_model_dir}",
        )
        if config.get("modules_to_save") or config.get("trainable_token_indices"):
            return [
                f"lora_model_dir: {recipe.lora_model_dir} holds layers or rows of the base, which adapters "
                "share; wanted one of factors alone"
            ]
    if isinstance(start, str) and (start.startswith("pissa") or start == "loftq"):
        return [
            f"{where} is {start}, which changes the base; beside others wanted true, gaussian, orthogonal "
            "or mica"
        ]
    return []


def _of_list(entries: Any, errors: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    if not isinstance(entries, list) or len(entries) > _MOST:
        found = f"{len(entries)} entries" if isinstance(entries, list) else repr(entries)
        errors.append(
            f"adapters: {found}, wanted a list of 1 to {_MOST}: `- name: law` and its keys below it"
        )
        return
    seen: set[str] = set()
    for number, entry in enumerate(entries):
        where = f"adapters.{number}"
        if not isinstance(entry, Mapping):
            errors.append(f"{where} is {entry!r}, wanted `name` and keys")
            continue
        name = entry.get("name")
        if name is None:
            errors.append(f"{where} has no name, wanted `name: law`")
            continue
        name = str(name)
        if wrong := _wrong_name(name, seen):
            errors.append(f"{where}.name is {name!r}, {wrong}")
            continue
        seen.add(name.lower())
        own = {SYNONYMS.get(str(key), str(key)): value for key, value in entry.items() if key != "name"}
        errors += [f"{where}.{key}: {_not_own(key)}" for key in own if key not in OWN]
        yield name, own


def _wrong_name(name: str, seen: set[str]) -> str:
    if not _NAME.fullmatch(name) or len(name) > 120:
        return "wanted letters, digits and . _ + = -, 120 at most and the first no sign: it names a folder"
    if _TAKEN.fullmatch(name):
        return "which is the name of something else in output_dir; wanted another"
    return "which is written twice" if name.lower() in seen else ""


def _not_own(key: str) -> str:
    if key in REFUSED_BESIDE:
        return f"not with adapters: {REFUSED_BESIDE[key]}"
    if key in KEYS:
        return "all adapters share it; write it once, outside adapters"
    return "unknown key of an adapter; docs/how_to/many_adapters.md lists those that it may have"


def _of_grid(grid: Any, errors: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    if not isinstance(grid, Mapping):
        errors.append(f"sweep is {grid!r}, wanted keys with lists of values: `lora_r: [8, 32]`")
        return
    axes: dict[str, list[Any]] = {}
    for written, values in grid.items():
        key = SYNONYMS.get(str(written), str(written))
        if key not in OWN:
            errors.append(f"sweep.{written}: {_not_own(key)}")
        elif (
            not isinstance(values, list)
            or not values
            or any(isinstance(v, list | dict | None) for v in values)
        ):
            errors.append(f"sweep.{written} is {values!r}, wanted a list of numbers or words")
        else:
            axes[key] = values
    count = 1
    for values in axes.values():
        count *= len(values)
    if not axes or count > _MOST:
        errors.extend([f"sweep: {count} adapters, wanted {_MOST} at most"] if axes else [])
        return
    found = [
        ("-".join(f"{SHORT.get(key, key)}{_word(v)}" for key, v in zip(axes, values, strict=True)), values)
        for values in itertools.product(*axes.values())
    ]
    twice = [name for name, times in Counter(name.lower() for name, _ in found).items() if times > 1]
    for name, values in found:
        if name.lower() in twice or not _NAME.fullmatch(name):
            wrong = "is the name of two" if name.lower() in twice else "is no name of a folder"
            errors.append(f"sweep: {name!r}, made of the values, {wrong}; write the adapters in a list")
            return
        yield name, dict(zip(axes, values, strict=True))


def _word(value: Any) -> str:
    """A value in a name: 2e-4 for 0.0002, however it was written."""
    try:
        number = Decimal(repr(value) if isinstance(value, float) else str(value)).normalize()
    except ArithmeticError:
        return str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, bool) or not number.is_finite():
        return str(value).lower()
    sign, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    if exponent + len(digits) > -3 and exponent <= 6:
        return f"{number:f}"
    mantissa = "".join(map(str, digits))
    power = exponent + len(digits) - 1
    return f"{'-' if sign else ''}{mantissa[0]}{'.' + mantissa[1:] if mantissa[1:] else ''}e{power}"


def _stop(written: Any, count: int, errors: list[str]) -> SweepStop | None:
    if not written:
        return None
    if not isinstance(written, Mapping) or not set(written) <= {"metric", "after", "keep"}:
        errors.append(f"sweep_stop is {written!r}, wanted {{metric: eval_loss, after: 200, keep: 3}}")
        return None
    metric, after, keep = written.get("metric", "eval_loss"), written.get("after"), written.get("keep", 1)
    if metric not in _METRICS:
        errors.append(f"sweep_stop.metric is {metric!r}, wanted one of {', '.join(_METRICS)}")
    for name, value in (("after", after), ("keep", keep)):
        if type(value) is not int or value < 1:
            errors.append(f"sweep_stop.{name} is {value!r}, wanted a number, 1 or more")
    if type(keep) is int and count and keep > count:
        errors.append(f"sweep_stop.keep is {keep}, and there are {count} adapters")
    return SweepStop(metric, after or 0, keep) if type(after) is int and type(keep) is int else None
