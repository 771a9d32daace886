"""sweep_stop: after so many steps the best adapters go on, and the others end with what they have."""

from __future__ import annotations

import math
from collections.abc import Mapping

from monograph.distributed.watchdog import by_first
from monograph.distributed.world import World
from monograph.recipe.config.many_recipes import SweepStop
from monograph.recipe.run.train import Run


class Sweep:
    """Who waits for whom, and who has been ended. All wait at step `after`, so that a decision is made of the
    same step of all, also in a run that was killed: `ended` is what adapters.json kept of it."""

    def __init__(
        self, stop: SweepStop | None, runs: Mapping[str, Run], ended: Mapping[str, int], world: World
    ) -> None:
        self._stop, self._runs, self._world = stop, runs, world
        self.ended = {name: step for name, step in ended.items() if name in runs}
        self._over: set[str] = set()
        self._decided = stop is None or bool(self.ended)
        for name, step in self.ended.items():
            runs[name].last_step = step
        if stop is not None and not self._decided:
            for name, run in runs.items():
                if stop.keep < len(runs) and run.progress.step > stop.after:
                    raise ValueError(
                        f"sweep_stop.after is {stop.after}, and adapter {name} is at step {run.progress.step}"
                    )

    def may_go_on(self, name: str) -> bool:
        run = self._runs[name]
        if self._decided or self._stop is None:
            return True
        return not self._stop.after <= run.progress.step < run.last_step

    def told_to_end(self, signal: int) -> None:
        """Nothing is decided any more: who waits writes its checkpoint and ends."""
        self._decided = True
        for run in self._runs.values():
            run.signal = run.signal or signal

    def has_ended(self, name: str) -> None:
        self._over.add(name)

    def decide(self) -> list[str]:
        """Once all have come to the step: lines to say."""
        stop, left = self._stop, [name for name in self._runs if name not in self._over]
        if self._decided or stop is None or any(self.may_go_on(name) for name in left):
            return []
        self._decided = True
        found = by_first(self._world, "evaluation", lambda: {name: self._metric(name) for name in self._runs})
        best = sorted(found, key=lambda name: (not math.isfinite(found[name]), found[name]))[: stop.keep]
        self.ended = {name: self._runs[name].progress.step for name in left if name not in best}
        for name, step in self.ended.items():
            self._runs[name].last_step = step
        kept = ", ".join(f"{name} ({found[name]:.4f})" for name in best)
        return [f"sweep_stop: by {stop.metric} at step {stop.after} go on: {kept}"]

    def _metric(self, name: str) -> float:
        """The last one up to that step."""
        stop = self._stop
        assert stop is not None
        lines = self._runs[name].metrics.lines
        values = [line[stop.metric] for line in lines if stop.metric in line and line["step"] <= stop.after]
        if not values and not any("skipped_steps" in line for line in lines):
            raise ValueError(
                f"sweep_stop.metric is {stop.metric}, and adapter {name} has none up to step {stop.after}; "
                "write val_set_size or test_datasets, and eval_steps"
            )
        return float(values[-1]) if values else math.inf
