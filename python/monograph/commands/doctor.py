"""`python -m monograph doctor CONFIG.yml`: is the step of this recipe one graph, and what does it keep?

Loads the model and the first two batches of the recipe, compiles forward and backward, and prints outer and
inner graphs, graph breaks and recompiles with their causes, the bytes saved for backward, and with Inductor's
code its compile time. Under torchrun also gathers of a sharded base, bytes, and what other ranks found
otherwise. Exit code 1 if the step is not one graph or keeps a copy of a weight.

    python -m monograph doctor qlora.yml --json --trace-only
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from monograph.commands.recipe_arguments import run_recipe
from monograph.recipe import Recipe

if TYPE_CHECKING:
    from monograph.distributed import World


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m monograph doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    parser.add_argument(
        "--trace-only", "--no-inductor", action="store_true", help="count graphs only, generate no code"
    )
    parser.add_argument("--quiet", action="store_true", help="say nothing while it compiles")
    return run_recipe(parser, arguments, _doctor, ranks="all")


def _doctor(recipe: Recipe, options: argparse.Namespace) -> int:
    from monograph.distributed import join, leave

    world = join()
    try:
        return _doctor_of(recipe, options, world)
    finally:
        leave(world)


def _doctor_of(recipe: Recipe, options: argparse.Namespace, world: World) -> int:
    from monograph.diagnosis import doctor
    from monograph.recipe.batches import Batches
    from monograph.recipe.compile_options import compile_options
    from monograph.recipe.encode import load_tokenizer
    from monograph.recipe.load_model import load_model
    from monograph.recipe.model_folder import model_folder
    from monograph.recipe.prepare import prepare
    from monograph.recipe.read_config import GENERATED
    from monograph.regions import make_regions

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
    return 0 if report.holds else 1
