"""`python -m support.rank_program train CONFIG.yml`: the command, watched, killed where the environment says.

    MONOGRAPH_TEST_LOG=FOLDER      each rank writes there which micro-batches it computed, one JSON line each
    MONOGRAPH_TEST_KILL=POINT:RANK:STEP[:SIGNAL]     the first start dies there; RANK -1 is the last one

The product reads neither: everything is put over it from here.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monograph.distributed import World

POINTS = (
    "load",
    "before forward",
    "after backward",
    "in the sum",
    "after the optimiser",
    "in save",
    "after save",
    "in evaluation",
)
EXPERT_POINTS = ("in dispatch", "in combine", "in backward of experts")
RESTART = "TORCHELASTIC_RESTART_COUNT"


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def note_time() -> None:
    """When it happened, for whoever measures how long the others take to name it."""
    if folder := os.environ.get("MONOGRAPH_TEST_LOG"):
        with open(os.path.join(folder, "struck"), "w", encoding="utf-8") as file:
            file.write(str(time.time()))


def _raise() -> None:
    raise ValueError("wanted by the test")


def log_micro_batches(folder: str) -> None:
    from monograph.distributed.world import World

    plain = World.doing
    path = os.path.join(folder, f"{os.getpid()}.jsonl")

    def doing(self: World, phase: str, detail: str = "") -> None:
        if phase == "micro-batch" and self.heartbeats is not None:
            start = os.environ.get("MONOGRAPH_TEST_START", os.environ.get(RESTART, "0"))
            line = {"step": self.heartbeats.step, "index": int(detail), "rank": self.rank, "start": start}
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        plain(self, phase, detail)

    World.doing = doing  # type: ignore[method-assign]


class Deadly:
    """What happens at the point; once, in the first start of the processes."""

    def __init__(self, text: str) -> None:
        self.point, who, step, *kind = text.split(":")
        self.step, self.signal = int(step), int(kind[0]) if kind else int(signal.SIGKILL)
        self.mine = int(who) % ranks() == rank() and os.environ.get(RESTART, "0") == "0"

    def strike(self) -> None:
        note_time()
        os.kill(os.getpid(), self.signal)

    def _be_slow(self) -> None:
        note_time()
        time.sleep(self.signal)

    def install(self) -> None:
        if not self.mine:
            return
        from monograph.distributed import world
        from monograph.recipe.run import train as recipe
        from monograph.training import step as training

        phases = {"before forward": "micro-batch", "after backward": "sum", "after the optimiser": "check"}
        if self.point in phases:
            self._at_phase(world.World, phases[self.point])
        elif self.point == "slow":  # for so many seconds
            self._at_phase(world.World, "micro-batch", self._be_slow)
        elif self.point == "raise":
            self._at_phase(world.World, "micro-batch", _raise)
        elif self.point == "load":
            self._before(recipe, "load_model")
        elif self.point in EXPERT_POINTS:
            self._in_exchange(world.World)
        elif self.point == "in the sum":
            self._in_the_sum(training)
        elif self.point == "in save":
            self._in_save()
        elif self.point == "after save":
            self._after(recipe.Run, "_save")
        elif self.point == "in evaluation":
            self._before(training.TrainStep, "evaluate")
        else:
            raise ValueError(f"point is {self.point!r}, wanted one of {', '.join(POINTS)}")

    def _at_phase(self, owner: Any, phase: str, work: Any = None) -> None:
        plain = owner.doing
        struck: list[bool] = []

        def doing(world: World, name: str, detail: str = "") -> None:
            plain(world, name, detail)
            if name == phase and world.heartbeats.step == self.step and not struck:
                struck.append(True)
                (work or self.strike)()

        owner.doing = doing

    def _before(self, owner: Any, name: str) -> None:
        def deadly(*arguments: Any, **options: Any) -> Any:
            self.strike()
            return plain(*arguments, **options)

        plain = getattr(owner, name)
        setattr(owner, name, deadly)

    def _after(self, owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def deadly(run: Any, *arguments: Any, **options: Any) -> Any:
            result = plain(run, *arguments, **options)
            if run.progress.step >= self.step:
                self.strike()
            return result

        setattr(owner, name, deadly)

    def _in_the_sum(self, training: Any) -> None:
        plain = training.sum_over_ranks
        steps: list[bool] = []

        def deadly(*arguments: Any) -> Any:
            steps.append(True)
            if len(steps) == self.step:
                threading.Timer(0.0005, self.strike).start()
                plain(*arguments)
                self.strike()
            return plain(*arguments)

        training.sum_over_ranks = deadly

    def _in_exchange(self, owner: Any) -> None:
        """Before this rank sends, at the first call of the step: the others wait for its rows."""
        from monograph.distributed.expert_exchange import ExpertExchange
        from monograph.distributed.expert_group import ExpertGroup

        now: dict[str, bool] = {}
        self._at_phase(owner, "micro-batch", lambda: now.update(step=True))
        home, back, swap = ExpertExchange._home, ExpertExchange.backward, ExpertGroup.swap

        def deadly_home(exchange: Any, *arguments: Any) -> None:
            if now.get("step") and self.point == "in combine":
                self.strike()
            home(exchange, *arguments)

        def deadly_backward(exchange: Any, *arguments: Any) -> Any:
            now["backward"] = True
            return back(exchange, *arguments)

        def deadly_swap(group: Any, *arguments: Any) -> None:
            wanted = "backward" if self.point == "in backward of experts" else "step"
            if now.get("step") and now.get(wanted) and self.point != "in combine":
                self.strike()
            swap(group, *arguments)

        exchange_class: Any = ExpertExchange
        group_class: Any = ExpertGroup
        exchange_class._home, exchange_class.backward = deadly_home, deadly_backward
        group_class.swap = deadly_swap

    def _in_save(self) -> None:
        if rank() == 0:
            from safetensors import torch as safetensors

            plain = safetensors.save_file

            def half(tensors: Any, path: str, *arguments: Any, **options: Any) -> Any:
                if path.endswith("optimizer.safetensors") and f"checkpoint-{self.step}" in path:
                    with open(path, "wb") as file:
                        file.write(b"\0" * 100)
                    self.strike()
                return plain(tensors, path, *arguments, **options)

            safetensors.save_file = half  # type: ignore[assignment]
        else:
            from monograph.distributed.world import World

            self._at_phase(World, "save")  # rank 0 writes, this one waits


def main(arguments: list[str]) -> int:
    import torch

    torch.set_num_threads(1)
    if folder := os.environ.get("MONOGRAPH_TEST_LOG"):
        log_micro_batches(folder)
    if text := os.environ.get("MONOGRAPH_TEST_KILL"):
        Deadly(text).install()
    from monograph.__main__ import main as command

    return command(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
