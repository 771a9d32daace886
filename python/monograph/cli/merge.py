"""`python -m monograph merge CONFIG.yml`: the adapter of a recipe into its base, by the native program.

    python -m monograph merge recipe.yml                      # into outputs/out-merged, beside output_dir
    python -m monograph merge outputs/out --to bf16 --out merged
    python -m monograph merge recipe.yml --base-model moved/here

What the recipe says is handed over as the native options; those written behind it go first. Any other first
argument is the folder of a base, and all is the native program's own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from monograph.cli import native
from monograph.cli.recipe_arguments import why_not_several
from monograph.recipe import ConfigError, Recipe, read_config
from monograph.recipe.config.recipe_file import NAME as RECIPE_NAME
from monograph.recipe.run.saved_recipe import trained_adapter

_KEYS = ("--base-model", "--output-dir", "--only")


def names_a_recipe(arguments: Sequence[str]) -> bool:
    """Whether the first argument is a recipe, or a folder that remembers one while no adapter is named. The
    native program hands over by the same rule: cli/exec_python.cpp."""
    first = arguments[0] if arguments else ""
    if first.endswith((".yml", ".yaml")):
        return True
    named = any(word.split("=")[0] == "--adapter" for word in arguments)
    return not named and os.path.isfile(os.path.join(first, RECIPE_NAME))


def _split(written: Sequence[str]) -> tuple[list[str], list[str]]:
    """Keys of the recipe that say where base and adapter are, and the options of the native program."""
    keys, options, words = [], [], iter(written)
    for word in words:
        if word.split("=")[0].replace("_", "-") in _KEYS:  # as of the other commands, either spelling
            keys += [word] if "=" in word else [word, *([value] if (value := next(words, None)) else [])]
        else:
            options.append(word)
    return keys, options


def run(arguments: list[str]) -> int:
    if told := why_not_several("python -m monograph merge"):
        print(told, file=sys.stderr)
        return 2
    keys, options = _split(arguments[1:])
    try:
        recipe = read_config(arguments[0], keys).recipe
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        folder = arguments[0] if os.path.isdir(arguments[0]) else None
        return native.exec_native(native_arguments(recipe, options, folder))
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 3


def native_arguments(recipe: Recipe, written: Sequence[str] = (), adapter: str | None = None) -> list[str]:
    """The call of the native program that merges the adapter of a recipe; `written` options go first."""
    from monograph.recipe.config.model_folder import model_folder, stored_path
    from monograph.recipe.run.base_fingerprint import NAME

    adapter = adapter or trained_adapter(recipe)
    if adapter is None:
        raise ValueError(f"there is no adapter in output_dir ({recipe.output_dir}); train first")
    base = model_folder(recipe)
    out = os.path.normpath(recipe.output_dir) + "-merged"
    if (gguf := stored_path(base)) != base:
        return _with_options(gguf, {"--adapter": [adapter], "--out": [out + ".gguf"]}, recipe, written)
    options = {"--adapter": [adapter], "--out": [out]}
    record = os.path.join(adapter, NAME)
    if not os.path.isfile(record):  # a checkpoint has that of its run
        record = os.path.join(recipe.output_dir, NAME)
    with open(record, encoding="utf-8") as file:
        trained_on = json.load(file)["base"]
    weights = trained_on["weights"]
    options["--base"] = [weights]
    named = {word.split("=")[0] for word in written}
    if weights == "dequantized" and not ({"--base", "--as"} & named):
        options |= (loaded := _loaded_as(recipe, base))
        if loaded and trained_on.get("packed", {}).get("experts"):
            options["--as-experts"] = ["packed"]
    return _with_options(base, options, recipe, written)


def _with_options(
    base: str, options: dict[str, list[str]], recipe: Recipe, written: Sequence[str]
) -> list[str]:
    """The call, in which what is written on the command line stands for the same option."""
    named = {word.split("=")[0] for word in written}
    if recipe.another_base:
        options = options | {"--another-base": []}
    given = [word for name, values in options.items() if name not in named for word in (name, *values)]
    return ["merge", base, *given, *written]


def _loaded_as(recipe: Recipe, base: str) -> dict[str, list[str]]:
    """How the recipe quantised a base while loading; nothing for a folder that is quantised."""
    from monograph.hf.transformers.loading import stored_quantization

    if stored_quantization(base) is not None:
        return {}
    if recipe.load_in_8bit:
        return {"--as": ["int8"], "--as-block-size": ["0"]}
    options = recipe.bnb_config_kwargs
    double = options.get("bnb_4bit_use_double_quant", True)
    kind = options.get("bnb_4bit_quant_type", "nf4")
    return {"--as": [kind]} | ({"--as-double-quant": []} if double else {})
