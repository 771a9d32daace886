"""A recipe from YAML: every key is honoured, ignored with a reason, or refused with an alternative."""

from __future__ import annotations

import difflib
import os
import re
import shutil
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

import yaml

from monograph.recipe.config.check_value import checked
from monograph.recipe.config.compile_options import check_compile_options, waits_in_cuda_graphs
from monograph.recipe.config.dataset_keys import DATASET_REFUSED
from monograph.recipe.config.key_row import Said
from monograph.recipe.config.key_support import ALL_MEANINGS, IGNORED, REFUSED, words_for_false
from monograph.recipe.config.keys import KEYS, TRL_KEYS, DatasetKeys, Recipe, TrlDatasetKeys, TrlRecipe
from monograph.recipe.config.many_recipes import ManyRecipes, expand, has_many, refused_beside
from monograph.recipe.config.meanings import take_optim_args
from monograph.recipe.config.model_checks import MODEL_CHECKS, check_adapter_keys, check_serving
from monograph.recipe.config.other_keys import KERNEL_PLUGINS, OTHER_NAMES, SYNONYMS, TRACKER_PLUGINS
from monograph.recipe.config.overrides import apply_overrides, parse_overrides
from monograph.recipe.config.placement import device_type
from monograph.recipe.config.recipe_file import folder_of_run, recipe_file
from monograph.recipe.config.run_checks import PLACE_CHECKS, RUN_CHECKS
from monograph.recipe.config.trl_checks import check_trl
from monograph.recipe.config.trl_choose import wants_trl

# Keys whose `~` is the home folder.
PATHS = tuple(name for name, row in KEYS.items() if row.path)
# Checks of keys together, in the order in which they speak.
CHECKS = (*MODEL_CHECKS, *RUN_CHECKS, check_serving, *PLACE_CHECKS)


class ConfigError(ValueError):
    """All that is wrong with a recipe, one line each."""

    def __init__(self, source: str, errors: Sequence[str]) -> None:
        self.errors = list(errors)
        super().__init__("\n".join(f"{source}: {error}" for error in self.errors))


@dataclass
class ReadRecipe:
    """A recipe that is right, and notices about keys that do nothing or mean another thing."""

    recipe: Recipe
    notices: list[str] = field(default_factory=list)
    many: ManyRecipes | None = None  # all of them, where adapters or a sweep say so; recipe is the first


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML that refuses a key written twice; the ordinary loader takes the last and says nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            name = self.construct_object(key_node, deep=True)
            if name in seen:
                raise ValueError(f"line {key_node.start_mark.line + 1}: {name} is written twice")
            seen.add(name)
        return super().construct_mapping(node, deep)


def read_config(path: str, arguments: Sequence[str] = (), *, many: bool = False) -> ReadRecipe:
    """The recipe of a file with `--key value` arguments over it. ConfigError lists all mistakes at once.

    The folder of an adapter stands for the recipe.yml in it, and is then its output_dir. many: a recipe of
    several adapters is read too, and not refused until one of them is named.
    """
    try:
        with open(recipe_file(path), encoding="utf-8") as file:
            keys = yaml.load(file, _Loader)
    except FileNotFoundError:
        raise ConfigError(path, ["there is no such file"]) from None
    except UnicodeDecodeError:
        raise ConfigError(path, ["this is not a text file; wanted YAML"]) from None
    except OSError as error:
        raise ConfigError(path, [f"it cannot be read: {error.strerror}"]) from None
    except yaml.YAMLError as error:
        raise ConfigError(path, [f"this is not YAML: {' '.join(str(error).split())}"]) from error
    except ValueError as error:
        raise ConfigError(path, [str(error)]) from error
    if not isinstance(keys, dict):
        raise ConfigError(path, [f"found {type(keys).__name__}, wanted `key: value` lines"])
    if os.path.isdir(path):
        keys["output_dir"] = folder_of_run(path)
    try:
        apply_overrides(keys, parse_overrides(arguments))
    except ValueError as error:
        raise ConfigError("command line", [str(error)]) from error
    read = check_keys(keys, path)
    if read.many is not None and not many:
        names = ", ".join(read.many.recipes)
        raise ConfigError(path, [f"adapters: this takes one of them; write --only with one of {names}"])
    return read


def check_keys(keys: Mapping[str, Any], source: str = "recipe") -> ReadRecipe:
    """A mapping as read from YAML to a recipe; a TrlRecipe if TRL trains it."""
    if has_many(keys):
        return _check_many(keys, source)
    keys, errors, notices = _with_meanings(keys)
    values: dict[str, Any] = {}
    engine = TrlRecipe if wants_trl(keys) else Recipe
    of_dataset = TrlDatasetKeys if engine is TrlRecipe else DatasetKeys
    known = [entry.name for entry in fields(engine)]
    hints = get_type_hints(engine)
    for written, value in keys.items():
        name = SYNONYMS.get(str(written), str(written))
        if name in ("datasets", "test_datasets"):
            values[name] = _datasets(value, name, errors, of_dataset)
        elif name in known:
            if isinstance(value, dict):  # so is `pad_token:` alone inside special_tokens
                value = {inside: entry for inside, entry in value.items() if entry is not None}
            if value is not None and not (name == "rl" and not value):  # an empty key is ignored
                _take(values, name, value, hints[name], name, errors)
        elif name in REFUSED:
            if value:
                errors.append(f"{name}: not supported; {REFUSED[name]}")
        elif name in IGNORED:
            if name == "plugins":
                errors += _other_plugins(value)
            if value:
                notices.append(f"{name}: ignored; {IGNORED[name]}")
                if name == "plugins" and any(part in str(value) for part in TRACKER_PLUGINS):
                    notices.append("plugins: trackers are those of accelerate; write report_to")
        else:
            errors.append(_unknown(name, (*known, *IGNORED, *REFUSED, *ALL_MEANINGS), OTHER_NAMES))
    for name in PATHS:
        if isinstance(values.get(name), str):
            values[name] = os.path.expanduser(values[name])
    if engine is Recipe:
        take_optim_args(values, errors)
    recipe = engine(**values)
    said = Said()
    for check in CHECKS:
        check(recipe, said)
    checks = [(said.errors, said.notices), check_adapter_keys(recipe, values)]
    unknown_method = bool(_wrong_keys(errors) & {"trainer", "rl", "reward_model"})
    if isinstance(recipe, TrlRecipe) and not unknown_method:
        checks.append(check_trl(recipe))
    for more_errors, more_notices in checks:
        errors += _not_said(more_errors, errors)
        notices += more_notices
    if unknown_method:  # the types of datasets are those of another trainer
        errors = [error for error in errors if not _OF_TYPE.match(error)]
    options, mode = recipe.torch_compile_options, recipe.torch_compile_mode
    device = device_type(Recipe(device="auto") if isinstance(recipe, TrlRecipe) else recipe)  # TRL's own
    more_errors, more_notices = check_compile_options(
        options, torch_compile=recipe.torch_compile, packing=recipe.sample_packing, device=device, mode=mode
    )
    errors += _not_said(more_errors + _surroundings(recipe), errors)
    if errors:
        raise ConfigError(source, errors)
    waits = waits_in_cuda_graphs(options, mode, device, recipe.providers)
    return ReadRecipe(recipe, notices + more_notices + waits)


def _check_many(keys: Mapping[str, Any], source: str) -> ReadRecipe:
    """Each adapter's keys as those of a recipe; what is wrong with all of them is said once."""
    expanded = expand(keys)
    read: dict[str, ReadRecipe] = {}
    wrong: dict[str, list[str]] = {}  # by adapter
    for name, own in {} if expanded.errors else expanded.keys.items():
        try:
            read[name] = check_keys(own, source)
            wrong[name] = refused_beside(read[name].recipe, expanded.stop)
        except ConfigError as error:
            wrong[name] = error.errors
    alike = [
        error for error in next(iter(wrong.values()), []) if all(error in each for each in wrong.values())
    ]
    own_errors = [f"adapter {name}: {e}" for name, each in wrong.items() for e in each if e not in alike]
    if errors := [*expanded.errors, *alike, *own_errors]:
        raise ConfigError(source, errors)
    notices = list(dict.fromkeys(notice for each in read.values() for notice in each.notices))
    recipes = {name: each.recipe for name, each in read.items()}
    first = next(iter(recipes.values()))
    if keys.get("only"):
        return ReadRecipe(first, notices)
    return ReadRecipe(first, notices, ManyRecipes(recipes, os.path.dirname(first.output_dir), expanded.stop))


def _with_meanings(written: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Keys as written without those of other recipes, and with ours that they mean; errors and notices."""
    keys, errors, notices = dict(written), list[str](), list[str]()
    for name in words_for_false():
        if keys.get(name) is False:
            keys[name] = "no"
    for name, meaning_of in ALL_MEANINGS.items():
        value = written.get(name)
        if not value:
            if name not in KEYS and name not in TRL_KEYS:
                keys.pop(name, None)  # asks for nothing
            continue
        meaning = meaning_of(value, written)
        if meaning is None:
            continue
        del keys[name]
        keys |= meaning.keys
        errors += meaning.errors
        notices += meaning.notices
    return keys, errors, notices


_NAMED = re.compile(r"([\w.]+)(?:: unknown key; (?:did you mean|here it is called) (\w+))?")


_OF_TYPE = re.compile(r"(test_)?datasets\.\d+\.(type\b|\w+: type )")


def _wrong_keys(errors: Sequence[str]) -> set[str]:
    """The keys that errors are about, and those that a misspelt one may have meant."""
    return {name for error in errors if (found := _NAMED.match(error)) for name in found.groups() if name}


def _not_said(more: Sequence[str], errors: Sequence[str]) -> list[str]:
    """Errors of a later check, but for those about a key that has one already: it has lost its value."""
    wrong = _wrong_keys(errors)
    return [
        error
        for error in more
        if not any(re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", error) for name in wrong)
    ]


def _take(values: dict[str, Any], name: str, value: Any, hint: Any, where: str, errors: list[str]) -> None:
    try:
        values[name] = checked(value, hint, where)
    except ValueError as error:
        errors.append(str(error))


def _datasets(value: Any, where: str, errors: list[str], kind: type[DatasetKeys]) -> list[DatasetKeys]:
    if value is None:
        return []
    if not isinstance(value, list):
        errors.append(
            f"{where} is {value!r}, wanted a list: `- path: train.jsonl` and `type: alpaca` below it"
        )
        return []
    hints = get_type_hints(kind)
    entries = []
    for number, entry in enumerate(value):
        entry_name = f"{where}.{number}"
        if not isinstance(entry, dict):
            errors.append(f"{entry_name} is {entry!r}, wanted `path` and `type`")
            continue
        values: dict[str, Any] = {}
        for name, given in entry.items():
            if name in hints:
                if given is not None:
                    _take(values, name, given, hints[name], f"{entry_name}.{name}", errors)
            elif name in DATASET_REFUSED:
                if given:
                    errors.append(f"{entry_name}.{name}: not supported; {DATASET_REFUSED[name]}")
            else:
                errors.append(_unknown(str(name), tuple(hints), {}, f"{entry_name}."))
        entries.append(kind(**values))
    return entries


def _unknown(name: str, known: Sequence[str], other_names: Mapping[str, str], where: str = "") -> str:
    if name in other_names:
        return f"{where}{name}: unknown key; here it is called {other_names[name]}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = (
        f"did you mean {near[0]}?" if near else "no key has a similar name; docs/reference/keys.md lists all"
    )
    return f"{where}{name}: unknown key; {hint}"


def _other_plugins(value: Any) -> list[str]:
    names = [value] if isinstance(value, str) else value or []
    return [
        f"plugins: {name} is not supported; leave it out"
        for name in names
        if not any(part in str(name) for part in (*KERNEL_PLUGINS, *TRACKER_PLUGINS))
    ]


def _surroundings(recipe: Recipe) -> list[str]:
    """What is wrong with the environment the recipe is to run in."""
    errors = []
    if recipe.mode in GENERATED and not has_compiler():
        asks = recipe.wants_inductor or f"step_mode: {recipe.step_mode}"
        errors.append(
            f"{asks} generates code, and no C++ compiler is found; install g++, or leave it out: the default "
            "step needs none"
        )
    return errors


# Modes of the step that need a C++ compiler.
GENERATED = ("inductor", "inductor_whole_step", "per_layer")


def has_compiler() -> bool:
    """Whether Inductor finds a C++ compiler."""
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "g++", "clang++"))
