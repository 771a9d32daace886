"""`python -m monograph train CONFIG.yml`: an adapter from a model and a file of documents.

python -m monograph train recipe.yml
python -m monograph train recipe.yml --only law     # one of its adapters, as it is trained among all
python -m monograph train recipe.yml --nproc-per-node 2 --max-restarts 3    # torchrun, on this host
torchrun --nproc-per-node 2 -m monograph train recipe.yml                   # the same, and several hosts
accelerate launch --num_processes 2 -m monograph train recipe.yml
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from typing import TypeVar

from monograph.cli.command_parser import OUTPUT_OPTIONS, CommandParser, say_next
from monograph.cli.recipe_arguments import run_recipe
from monograph.recipe import ConfigError, Recipe, read_config
from monograph.recipe.config.many_recipes import ManyRecipes

Result = TypeVar("Result")


def run(arguments: list[str]) -> int:
    parser = CommandParser("train", __doc__)
    processes = parser.add_argument_group(
        "several processes, by torchrun's launcher (docs/explain/distributed.md)"
    )
    processes.add_argument(
        "--nproc-per-node", "--nproc_per_node", type=int, metavar="N", help="so many ranks on this host"
    )
    processes.add_argument(
        "--max-restarts",
        "--max_restarts",
        type=int,
        metavar="N",
        help="so often all ranks start again when one fails, each time from the newest checkpoint; 0",
    )
    launcher = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    launcher.add_argument("--nproc-per-node", "--nproc_per_node")
    launcher.add_argument("--max-restarts", "--max_restarts")
    asked, rest = launcher.parse_known_args(arguments)
    if {"-h", "--help"} & set(arguments) or (asked.nproc_per_node is None and asked.max_restarts is None):
        return run_recipe(parser, arguments, _train, ranks="all", many=_train_many)
    return _launch(parser, asked.nproc_per_node, asked.max_restarts or "0", rest)


def _launch(parser: argparse.ArgumentParser, ranks: str | None, restarts: str, arguments: list[str]) -> int:
    """The same command once a rank, by the launcher behind torchrun; gives the exit code of the ranks."""
    if ranks is None:
        parser.error("--max-restarts is torchrun's and wants --nproc-per-node N beside it")
    if not ranks.isdecimal() or int(ranks) < 1:
        parser.error(f"--nproc-per-node is {ranks}, wanted a number of processes, 1 or more")
    if not restarts.isdecimal():
        parser.error(f"--max-restarts is {restarts}, wanted 0 or more")
    if os.environ.get("WORLD_SIZE"):
        parser.error("--nproc-per-node starts processes, and WORLD_SIZE says that a launcher has done so")
    try:
        if arguments and not arguments[0].startswith("-"):
            keys = [word for word in arguments[1:] if word not in OUTPUT_OPTIONS]
            read_config(arguments[0], keys, many=True)  # what is wrong is said once, before anything starts
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return _torchrun(int(ranks), int(restarts), arguments)


def _torchrun(ranks: int, restarts: int, arguments: list[str]) -> int:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    command = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    try:
        run.main([*command, "-m", "monograph", "train", *arguments])
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code  # as a shell says it
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _watched(train: Callable[[], Result], options: argparse.Namespace) -> Result:
    """What a training gives; a rank whose group has failed ends at once, for the others wait."""
    from monograph.distributed.watchdog import RankFailure
    from monograph.recipe.data import full_disk

    try:
        with redirect_stdout(sys.stderr) if options.json else nullcontext():  # TRL prints there
            return train()
    except RankFailure as failure:
        sys.stderr.write(f"{failure}\n" if str(failure) else "")
        sys.stderr.flush()
        full = full_disk.reason(failure)  # of this rank, or of the one that failed first
        os._exit(full_disk.EXIT_CODE if full else failure.code)  # the group waits for ranks that are gone


def _train_many(many: ManyRecipes, options: argparse.Namespace) -> int:
    from monograph.recipe.run.sweep_table import as_json, report
    from monograph.recipe.run.train_many import train_many

    outcome = _watched(lambda: train_many(many, quiet=options.quiet), options)
    if outcome.writes:
        if options.json:
            print(as_json(report(outcome.output_dir)), flush=True)
        for name, error in outcome.failed.items():
            print(f"error: adapter {name}: {error}", file=sys.stderr)
    if outcome.signal is not None:
        return 128 + outcome.signal
    if outcome.writes and not outcome.failed:
        say_next(options, "python", "-m", "monograph", "sweep-report", outcome.output_dir)
    return 3 if outcome.failed else 0


def _train(recipe: Recipe, options: argparse.Namespace) -> int:
    from monograph.recipe.train import train

    outcome = _watched(lambda: train(recipe, quiet=options.quiet), options)
    if outcome.signal is None and recipe.serve_with and outcome.writes:
        from monograph.cli import serve

        if code := serve.convert(recipe, quiet=options.quiet or options.json):
            return code
    if options.json and outcome.writes:
        keys = ("output_dir", "step", "total", "best_step", "signal")
        print(json.dumps({"schema_version": 1} | {key: getattr(outcome, key) for key in keys}), flush=True)
    if outcome.signal is None and recipe.merge_lora and outcome.writes:
        from monograph.cli import merge, native

        silent = ["--quiet"] if options.quiet or options.json else []
        return native.exec_native(merge.native_arguments(recipe, silent))
    if outcome.signal is None and outcome.writes:
        ask = ("python", "-m", "monograph", "generate", outcome.output_dir, "--prompt", "...")
        say_next(options, *ask, note=f"; python -m monograph merge {shlex.quote(outcome.output_dir)}")
    return 0 if outcome.signal is None else 128 + outcome.signal  # as a shell: 130 Ctrl-C, 143 SIGTERM
