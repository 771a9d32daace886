"""The rows of support.model_changes in runs that SIGKILL ends and a checkpoint begins anew.

PYTHONPATH=python:tests/python python -m support.killed_between_steps [MODE [0 | 1]]    # prints its lines
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import tempfile
from typing import Any

import torch
import torch._dynamo

from support.between_steps import SAME, Setting, cell_of, nothing
from support.model_changes import ROWS, Row, adapter
from support.step_settings import line

WHEN = ("killed in the step after the change", "killed in the step after that")


class Run:
    """One process's part of a run: steps 1 and 2, the change, steps 3 and 4."""

    def __init__(self, setting: Setting, change: Row, built: dict[str, Any]) -> None:
        self.setting, self.change = setting, change
        self.model = setting.made(**setting.built | built)
        self.ours: Any = None

    def start(self) -> None:
        self.ours = self.setting.step(self.model)

    def turn(self, number: int) -> None:
        self.change(self.model, number, lambda: self.setting.step(self.model, "eager"))

    def step(self, number: int) -> float:
        """After a refusal the step is made anew, as its error says."""
        rows = self.setting.rows(number, self.model)
        try:
            return self.ours(rows)
        except RuntimeError:
            self.ours.step.rebuild()
            return self.ours(rows)

    def save(self, path: pathlib.Path) -> None:
        """With adapters that are not trained. What a row itself has swapped out is the row's to keep."""
        kept = getattr(self.model, "kept", None)
        state = self.ours.step.state_dict()
        torch.save({"adapter": adapter(self.model), "state": state, "kept": kept}, path)

    def load(self, path: pathlib.Path) -> None:
        found = torch.load(path)
        self.model.load_state_dict(found["adapter"], strict=False)
        self.ours.step.load_state_dict(found["state"])
        if found["kept"] is not None:
            self.model.kept = found["kept"]

    def result(self, losses: list[float]) -> dict[str, Any]:
        return {"losses": losses, "adapter": adapter(self.model), "state": self.ours.step.state_dict()}

    def die_in_backward(self, number: int) -> None:
        torch.autograd.grad = _deadly
        self.step(number)


def _deadly(*arguments: Any, **options: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _forked(work: Any, path: pathlib.Path) -> int:
    """`work()` in a fork, whose result or refusal goes to the file; its exit status."""
    child = os.fork()
    if child == 0:
        try:
            torch.save(work(), path)
        except (RuntimeError, ValueError) as error:
            torch.save(str(error), path)
        except BaseException as error:
            torch.save(f"{type(error).__name__}: {error}", path)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _whole(setting: Setting, text: str, folder: pathlib.Path, when: str) -> dict[str, Any]:
    """The unbroken run; beside it one that dies, as its fork."""
    change, built = ROWS[text]
    run = Run(setting, nothing, built)
    run.start()
    losses = [run.step(number) for number in (1, 2)]
    run.change = change
    if when == WHEN[0]:
        run.save(folder / "checkpoint")
    run.turn(1)
    status = _forked(lambda: run.die_in_backward(3), folder / "dead") if when == WHEN[0] else 0
    losses.append(run.step(3))
    if when == WHEN[1]:
        run.save(folder / "checkpoint")
    run.turn(2)
    if when == WHEN[1]:
        status = _forked(lambda: run.die_in_backward(4), folder / "dead")
    losses.append(run.step(4))
    assert status == -signal.SIGKILL  # a step that is refused does not come so far
    return run.result(losses)


def _again(setting: Setting, text: str, folder: pathlib.Path, when: str) -> dict[str, Any]:
    """A run that begins with the checkpoint: before the change, or with it made before the step is."""
    change, built = ROWS[text]
    run = Run(setting, change, built)
    losses = []
    if when == WHEN[0]:
        run.start()
        run.load(folder / "checkpoint")
        run.turn(1)
        losses.append(run.step(3))
    else:
        run.turn(1)
        run.start()
        run.load(folder / "checkpoint")
    run.turn(2)
    return run.result([*losses, run.step(4)])


def cell(setting: Setting, text: str, when: str) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        _forked(lambda: _whole(setting, text, folder, when), folder / "whole")
        whole = torch.load(folder / "whole")
        if isinstance(whole, str):
            return cell_of(whole)
        _forked(lambda: _again(setting, text, folder, when), folder / "again")
        again = torch.load(folder / "again")
    if isinstance(again, str):
        return cell_of(again)
    if again["losses"] != whole["losses"][-len(again["losses"]) :]:
        return f"SILENT: losses {again['losses']}, unbroken {whole['losses']}"
    for part in ("adapter", "state"):
        if again[part].keys() != whole[part].keys():
            return f"SILENT: {part} has {sorted(again[part].keys() ^ whole[part].keys())[:3]}"
        for name, value in whole[part].items():
            if not torch.equal(value, again[part][name]):
                return f"SILENT: {part} {name}"
    return SAME


def outcomes(setting: Setting, when: str) -> dict[str, str]:
    found = {}
    for text in ROWS:
        found[text] = cell(setting, text, when)
        print(f"{when}: {text}: {found[text]}", file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    setting = Setting(sys.argv[1] if len(sys.argv) > 1 else "eager")
    # Once here what every fork would import for itself: 17 s of processor time a row in place of 26.
    warm = Run(setting, nothing, {})
    warm.start()
    warm.step(1)
    torch._dynamo.reset()
    for when in [WHEN[int(sys.argv[2])]] if len(sys.argv) > 2 else WHEN:
        cells = outcomes(setting, when)
        rebuilt = {text: SAME for text in ROWS}  # what is refused is trained after step.rebuild()
        mode = "" if setting.mode == "eager" else f", mode `{setting.mode}`"
        print(line(when + mode, cells, rebuilt))
