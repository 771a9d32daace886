"""`python -m monograph generate OUT_DIR`: asks the tuned model.

    python -m monograph generate outputs/out --prompt "What is the capital of France?"
    python -m monograph generate recipe.yml --prompt "What is the capital of France?"
    python -m monograph generate recipe.yml                       # asks for prompts; an empty line ends
    echo "Once upon a time" | python -m monograph generate recipe.yml --completion --temperature 0.8
    python -m monograph generate --native BASE --adapter OUT_DIR --tokens 1,2,3    # by the native program

A prompt is worded as in training: by the chat template or the instruction format of the first dataset.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from monograph.cli import native
from monograph.cli.command_parser import CommandParser, say_next
from monograph.cli.recipe_arguments import run_recipe
from monograph.recipe import Recipe


def run(arguments: list[str]) -> int:
    if "--native" in arguments:  # the same rule as in cli/exec_python.cpp
        return native.exec_native(["generate", *arguments])
    parser = CommandParser("generate", __doc__)
    parser.add_argument("--prompt", action="append", help="what to ask; may be given several times")
    parser.add_argument("--adapter-dir", metavar="DIR", help="the adapter; that of output_dir by default")
    parser.add_argument("--base", action="store_true", help="the base alone, without an adapter")
    kinds = parser.add_mutually_exclusive_group()
    for kind in ("chat", "instruction", "completion"):
        kinds.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind, help=f"as {kind}")
    some = _number(int, lambda value: value >= 1, "1 or more")
    any_number = _number(float, lambda value: 0 <= value < math.inf, "0 or more")
    share = _number(float, lambda value: 0 < value <= 1, "more than 0, at most 1")
    count = _number(int, lambda value: value >= 0, "0 or more")
    factor = _number(float, lambda value: 0 < value < math.inf, "more than 0")
    parser.add_argument("--max-new-tokens", type=some, default=256, metavar="N", help="at most; 256")
    parser.add_argument("--temperature", type=any_number, default=0.0, help="0, the default: likeliest token")
    parser.add_argument("--top-p", type=share, default=1.0, help="least set of tokens with this probability")
    parser.add_argument("--top-k", type=count, default=0, help="among the k likeliest tokens; 0: all")
    parser.add_argument("--repetition-penalty", type=factor, default=1.0, help="above 1: fewer repetitions")
    parser.add_argument("--seed", type=int, help="the same seed, the same text")
    return run_recipe(parser, arguments, _generate)


def _number(
    kind: type[int] | type[float], in_range: Callable[[float], bool], wanted: str
) -> Callable[[str], int | float]:
    """A type for argparse: a number in a range."""

    def read(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not in_range(value):
            raise argparse.ArgumentTypeError(f"is {text}, wanted {wanted}")
        return value

    return read


def _prompts(options: argparse.Namespace) -> Iterator[str]:
    """The prompts given, or those a person types, or all of standard input."""
    if options.prompt:
        yield from options.prompt
    elif not sys.stdin.isatty():
        yield sys.stdin.read().rstrip("\n")
    else:
        while text := _typed():
            yield text


def _typed() -> str:
    try:
        return input("> ")
    except EOFError:
        return ""


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _keep(text: str) -> None:
    """With --json the answer is printed as a whole."""


def _generate(recipe: Recipe, options: argparse.Namespace) -> int:
    from monograph.recipe.run.generate import Generator, Sampling, find_adapter

    folder = options.config if os.path.isdir(options.config) else None  # the folder of an adapter
    adapter = None if options.base else options.adapter_dir or folder or find_adapter(recipe)
    if recipe.adapter is None and not options.base:  # the weights themselves were trained
        recipe, adapter = replace(recipe, base_model=folder or recipe.output_dir), None
    elif adapter is None and not options.base:
        raise ValueError(
            f"there is no adapter in output_dir ({recipe.output_dir}); train first, or give "
            "--adapter-dir or --base"
        )
    start = recipe.lora_model_dir
    if adapter and adapter == start != folder and not (options.adapter_dir or options.quiet):
        print(
            f"note: output_dir ({recipe.output_dir}) has no adapter yet; that of lora_model_dir ({adapter}) "
            "answers",
            file=sys.stderr,
        )
    if options.adapter_dir and not os.path.isfile(os.path.join(options.adapter_dir, "adapter_config.json")):
        raise ValueError(f"--adapter-dir: {options.adapter_dir} has no adapter_config.json")
    generator = Generator(recipe, adapter, options.kind)
    sampling = Sampling(
        options.max_new_tokens,
        options.temperature,
        options.top_p,
        options.top_k,
        options.repetition_penalty,
        options.seed,
    )
    history: list[dict[str, str]] = []
    for prompt in _prompts(options):
        text = generator.answer(
            generator.tokens(prompt, history), sampling, _keep if options.json else _write
        )
        row = {"schema_version": 1, "prompt": prompt, "text": text}
        _write(f"{json.dumps(row)}\n" if options.json else "\n")
        if not options.prompt:  # a person goes on talking; prompts on the command line stand alone
            history += [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
    if adapter:
        say_next(options, "python", "-m", "monograph", "merge", options.config)
    return 0
