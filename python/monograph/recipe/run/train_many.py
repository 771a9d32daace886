"""Several runs in one process on one base: each as it would be alone, a step of each in turn.

Every adapter has modules, step, data, schedule and folder of its own (shared_base.py), so that nothing of a
run can reach another: what it computes and writes is what `--only NAME` gives. They share the base's tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from monograph.distributed.watchdog import together
from monograph.distributed.world import World
from monograph.many.shared_base import with_same_base
from monograph.recipe.config.compile_options import compile_options
from monograph.recipe.config.keys import Recipe
from monograph.recipe.config.many_recipes import ManyRecipes
from monograph.recipe.run.checkpoint import checkpoints
from monograph.recipe.run.interrupt import Interrupt
from monograph.recipe.run.load_model import load_base
from monograph.recipe.run.outcome import Outcome
from monograph.recipe.run.output_folder import held
from monograph.recipe.run.progress import Reporter
from monograph.recipe.run.ranks import check_ranks, quiet_unless_first
from monograph.recipe.run.sweep_stop import Sweep
from monograph.recipe.run.sweep_table import draw, read_record, report, table, write_record
from monograph.recipe.run.train import Run, make_run


@dataclass
class ManyOutcome:
    """outcomes: of the adapters that came to an end; failed: what the others raised, by name."""

    output_dir: str
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    signal: int | None = None
    writes: bool = True


class NamedReporter(Reporter):
    """One of several on a terminal: lines with its name and no bar."""

    def __init__(self, name: str, total: int, first: int, *, quiet: bool) -> None:
        super().__init__(total, first, Console(stderr=True, quiet=quiet, force_terminal=False))
        self._name = name

    def say(self, text: str) -> None:
        super().say(f"{self._name}: {text}")


class Heard:
    """The interrupt of all, as one run asks for it: being deaf at its end is its own."""

    def __init__(self, interrupt: Interrupt) -> None:
        self._of_all, self.deaf = interrupt, False

    @property
    def signal(self) -> int | None:
        return self._of_all.signal

    @property
    def asked(self) -> bool:
        return self._of_all.asked


class OneBase:
    """The base of all: loaded by the first who asks."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._base: Any = None

    def __call__(self, folder: str) -> Any:
        if self._base is None:
            self._base = load_base(self._recipe, folder)
        return with_same_base(self._base)


def train_many(many: ManyRecipes, *, quiet: bool = False) -> ManyOutcome:
    """Trains all adapters to their ends, or to the next Ctrl-C or SIGTERM, on the ranks of a launcher."""
    recipe = next(iter(many.recipes.values()))
    with together(recipe.ddp_timeout) as world, quiet_unless_first(world), ExitStack() as stack:
        for own in many.recipes.values():
            check_ranks(own, world)
        if world.first:
            for folder in (many.output_dir, *(own.output_dir for own in many.recipes.values())):
                stack.enter_context(held(folder))
        stack.enter_context(compile_options(recipe.torch_compile_options, recipe.torch_compile_mode))
        return ManyRuns(many, world, quiet).train()


class ManyRuns:
    """The runs of all adapters, and whose turn it is."""

    def __init__(self, many: ManyRecipes, world: World, quiet: bool) -> None:
        self.many, self.world, self.quiet = many, world, quiet
        self.outcome = ManyOutcome(many.output_dir, writes=world.first)
        recipes = _resumed_alike(many.recipes)
        base = OneBase(next(iter(recipes.values())))
        self.runs: dict[str, Run] = {}
        for name, recipe in recipes.items():
            try:
                self.runs[name] = make_run(recipe, world, base)
            except ValueError as error:
                raise ValueError(f"adapter {name}: {error}") from error
        resumed = any(run.resumed for run in self.runs.values())
        ended = read_record(many.output_dir).get("ended", {}) if resumed else {}
        self.sweep = Sweep(many.stop, self.runs, ended, world)

    def train(self) -> ManyOutcome:
        several = self.world.size > 1
        with Interrupt(among_ranks=several) as interrupt:
            turns = {name: self._turns(name, run, interrupt) for name, run in self.runs.items()}
            self._record()
            while turns:
                for name in [name for name in turns if self.sweep.may_go_on(name)]:
                    if not self._one_turn(name, turns[name]):
                        del turns[name]
                        self.sweep.has_ended(name)
                    # On several ranks a signal counts once they have agreed on it.
                    if signal := self.outcome.signal if several else interrupt.signal:
                        self.sweep.told_to_end(signal)
                for line in self.sweep.decide():
                    self._say(line)
                    self._record()
            interrupt.deaf = several
        self._close()
        return self.outcome

    def _turns(self, name: str, run: Run, interrupt: Interrupt) -> Iterator[int]:
        with NamedReporter(name, run.epochs.total, run.progress.step, quiet=self.quiet) as reporter:
            yield from run.steps(reporter, Heard(interrupt))

    def _one_turn(self, name: str, turns: Iterator[int]) -> bool:
        """A step of one adapter; whether it goes on. What ends one ends no other."""
        try:
            if next(turns, None) is not None:
                return True
        except ValueError as error:
            self.outcome.failed[name] = " ".join(str(error).split())
            self._say(f"{name}: ended by an error: {self.outcome.failed[name]}")
        else:
            self.outcome.outcomes[name] = ended = self.runs[name].outcome()
            self.outcome.signal = self.outcome.signal or ended.signal
        self._record()
        return False

    def _record(self) -> None:
        if self.world.first:
            states = {name: self._state(name) for name in self.runs}
            write_record(self.many.output_dir, states, self.sweep.ended)

    def _state(self, name: str) -> str:
        if name in self.outcome.failed:
            return "failed"
        found = self.outcome.outcomes.get(name)
        if found is None or found.interrupted:
            return "not finished"
        return f"ended by sweep_stop at step {found.step}" if name in self.sweep.ended else "done"

    def _close(self) -> None:
        if self.world.first:
            rows = report(self.many.output_dir)
            self._say(f"{table(rows)}\nlosses in {draw(self.many.output_dir, rows)}")

    def _say(self, text: str) -> None:
        Console(stderr=True, quiet=self.quiet).print(text, highlight=False, soft_wrap=True, markup=False)


def _resumed_alike(recipes: dict[str, Recipe]) -> dict[str, Recipe]:
    """Each goes on from its own newest checkpoint. Where some have one, those without begin: the run was
    killed before their first."""
    asked = [recipe for recipe in recipes.values() if recipe.resume_from_checkpoint in (True, "auto")]
    if any(checkpoints(recipe.output_dir) for recipe in asked):
        for recipe in asked:
            recipe.resume_from_checkpoint, recipe.auto_resume_from_checkpoints = None, True
    return recipes
