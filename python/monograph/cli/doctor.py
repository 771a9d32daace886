"""`python -m monograph doctor CONFIG.yml`: is the step of this recipe one graph, and what does it keep?

Loads the model and the first two batches of the recipe, compiles forward and backward, and prints outer and
inner graphs, graph breaks and recompiles with their causes, the bytes saved for backward, and with Inductor's
code its compile time. Under torchrun also gathers of a sharded base, bytes, and what other ranks found
otherwise. Exit code 1 if the step is not one graph or keeps a copy of a weight.

    python -m monograph doctor qlora.yml --json --trace-only

With `trainer: trl` or `rl` it is the step of TRL's trainer: forward, loss and backward. With `adapters` or
`sweep` it is what is compiled when one of them retires and another joins; `--only NAME` looks at one.

The self-test of a device takes no recipe: each test passes, fails or is skipped with a reason. Exit code 1 if
one fails. docs/explain/gpu.md says how to send its report. `--verify` checks a report that was sent: exit
code 3 if it is incomplete, altered or of an unknown version.

    python -m monograph doctor --device cuda --out report.json
    python -m monograph doctor --verify report.json
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import TYPE_CHECKING

from monograph.cli.command_parser import CommandParser, say_next

# The self-test of a card needs torch and nothing else: no YAML, no transformers.
if TYPE_CHECKING:
    from monograph.distributed import World
    from monograph.recipe import Recipe
    from monograph.recipe.config.keys import TrlRecipe
    from monograph.recipe.config.many_recipes import ManyRecipes


MOST_BYTES = 16 << 20  # of a report; a whole one has about 20 KB


def run(arguments: list[str]) -> int:
    asked = [a for a in arguments if a.partition("=")[0] in ("--device", "--verify")]
    if asked and not {"-h", "--help"} & set(arguments):
        return _self_test(arguments)
    from monograph.cli.recipe_arguments import run_recipe

    parser = CommandParser("doctor", __doc__)
    parser.add_argument("--device", metavar="cuda", help="the self-test of a device, without a recipe")
    parser.add_argument("--verify", metavar="FILE", help="check the report of a self-test")
    parser.add_argument("--out", metavar="FILE", help="write the report of a self-test to a file")
    parser.add_argument(
        "--trace-only", "--no-inductor", action="store_true", help="count graphs only, generate no code"
    )
    return run_recipe(parser, arguments, _doctor, ranks="all", many=_doctor_of_many)


def _self_test(arguments: list[str]) -> int:
    from monograph.diagnosis.selftest.device import DEVICES

    parser = CommandParser("doctor", __doc__)
    parser.add_argument("--device", choices=list(DEVICES))
    parser.add_argument("--verify", metavar="FILE", type=pathlib.Path)
    parser.add_argument("--out", metavar="FILE", type=pathlib.Path)
    options = parser.parse_args(arguments)
    if (options.device is None) == (options.verify is None):
        parser.error("wanted one of --device and --verify")
    return _verify(options.verify) if options.verify else _test_device(options)


def _test_device(options: argparse.Namespace) -> int:
    from monograph.diagnosis.progress import Progress
    from monograph.diagnosis.selftest import run as run_self_test
    from monograph.diagnosis.selftest.device import DEVICES

    say = Progress(not options.quiet).say
    report = run_self_test(DEVICES[options.device](), say)
    text = json.dumps(report, indent=1)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")
        if not (options.json or options.quiet):
            print(f"wrote {options.out}")
    if options.json:
        print(text)
    else:
        rows = report["tests"]
        counts = {word: sum(row["result"] == word for row in rows) for word in ("pass", "fail", "skipped")}
        print(
            f"{report['device']}: {report['state']}; "
            + ", ".join(f"{n} {word}" for word, n in counts.items())
        )
    if options.out is not None:
        say_next(options, "python", "-m", "monograph", "doctor", "--verify", str(options.out))
    return 1 if report["state"] == "failed" else 0


def _verify(path: pathlib.Path) -> int:
    from monograph.diagnosis.selftest import wrong_with

    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes, a report has at most {MOST_BYTES}")
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        print(f"error: {path}: {error}", file=sys.stderr)
        return 3
    found = wrong_with(report)
    for problem in found:
        print(f"error: {path}: {problem}", file=sys.stderr)
    if not found:
        card = report["hardware"].get("architecture", "no card")
        print(f"{path}: whole and unaltered; {report['device']}, {card}: {report['state']}")
    return 3 if found else 0


def _doctor(recipe: Recipe, options: argparse.Namespace) -> int:
    from monograph.distributed import join, leave
    from monograph.recipe.config.keys import TrlRecipe
    from monograph.recipe.run.output_folder import no_empty_folder

    if isinstance(recipe, TrlRecipe):
        with no_empty_folder(recipe.output_dir):  # which a trainer makes
            return _doctor_of_trainer(recipe, options)
    world = join()
    try:
        return _doctor_of(recipe, options, world)
    finally:
        leave(world)


def _doctor_of_trainer(recipe: TrlRecipe, options: argparse.Namespace) -> int:
    """Three steps of TRL's own loop, on its own batches."""
    from monograph.diagnosis import doctor
    from monograph.recipe.config.compile_options import compile_options
    from monograph.recipe.config.read_config import GENERATED
    from monograph.recipe.trl.run import make_trainer

    trainer = make_trainer(recipe)
    inductor = recipe.mode in GENERATED and not options.trace_only
    with compile_options(recipe.torch_compile_options, recipe.torch_compile_mode):
        report = doctor(trainer, inductor=inductor, quiet=options.quiet)
    print(report.to_json() if options.json else report)
    _say_next(options, report.holds)
    return 0 if report.holds else 1


def _say_next(options: argparse.Namespace, holds: bool) -> None:
    if holds:
        say_next(options, "python", "-m", "monograph", "train", options.config)
    else:
        say_next(
            options,
            note="the causes are listed above; docs/reference/training.md, section doctor, explains each",
        )


def _doctor_of_many(many: ManyRecipes, options: argparse.Namespace) -> int:
    """Two steps of all adapters in this process, then one less, then another in its place."""
    from monograph.cli.recipe_arguments import why_not_several
    from monograph.diagnosis.many_doctor import doctor_many
    from monograph.recipe.config.compile_options import compile_options
    from monograph.recipe.run.many_runs import runs_of

    if told := why_not_several("doctor of several adapters"):
        raise ValueError(told)
    recipe = next(iter(many.recipes.values()))
    base, runs, batches = runs_of(many.recipes)
    mode = "graph" if recipe.mode == "eager" or options.trace_only else recipe.mode
    with compile_options(recipe.torch_compile_options, recipe.torch_compile_mode):
        report = doctor_many(base, runs, batches, mode=mode, quiet=options.quiet)
    print(report.to_json() if options.json else report)
    _say_next(options, report.holds)
    return 0 if report.holds else 1


def _doctor_of(recipe: Recipe, options: argparse.Namespace, world: World) -> int:
    from monograph.diagnosis import doctor
    from monograph.recipe.config.compile_options import compile_options
    from monograph.recipe.config.model_folder import model_folder
    from monograph.recipe.config.placement import check_ranks_of_device, device_of
    from monograph.recipe.config.read_config import GENERATED
    from monograph.recipe.data.encode import load_tokenizer
    from monograph.recipe.data.prepare import prepare
    from monograph.recipe.run.batches import Batches
    from monograph.recipe.run.load_model import load_model
    from monograph.training.regions import make_regions

    check_ranks_of_device(device_of(recipe), world.size)
    folder = model_folder(recipe)
    tokenizer = load_tokenizer(recipe, folder)
    if world.first:  # the others find it prepared
        prepare(recipe, tokenizer)
    world.barrier()
    batches = Batches(recipe, prepare(recipe, tokenizer).train, tokenizer.pad_token_id, training=True)
    steps = [batches.step(0, 0), batches.step(0, min(1, batches.sampler.steps(0) - 1))]
    model = load_model(recipe, folder, world)
    inductor = recipe.mode in GENERATED
    if not inductor:
        make_regions(model, where_possible=True)
    rows = [step[0] for step in steps]
    with compile_options(recipe.torch_compile_options, recipe.torch_compile_mode):
        quiet = options.quiet or not world.first
        together = world if world.size > 1 else None
        report = doctor(
            model, rows, inductor=inductor and not options.trace_only, quiet=quiet, world=together
        )
    if world.first:
        print(report.to_json() if options.json else report)
        _say_next(options, report.holds)
    return 0 if report.holds else 1
