"""Figures of a run: metrics.jsonl, loss.png, and the trackers that people name in report_to."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from monograph.recipe.config.keys import Recipe

# By which accelerate sees that it is one of several.
_RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Metrics:
    """One JSON object a line: `{"step", "loss", "learning_rate", ...}` or `{"step", "eval_loss"}`."""

    def __init__(self, recipe: Recipe, resumed_at: int) -> None:
        self._folder = recipe.output_dir
        self.path = os.path.join(self._folder, "metrics.jsonl")
        self.lines = [line for line in read_metrics(self.path) if line["step"] <= resumed_at]
        with open(f"{self.path}.new", "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in self.lines)
        os.replace(f"{self.path}.new", self.path)
        self._trackers = _trackers(recipe)

    def add(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self._trackers is not None:
            values = {name: value for name, value in line.items() if name != "step"}
            self._trackers.log(values, step=line["step"])

    def plot(self) -> str:
        path = os.path.join(self._folder, "loss.png")
        plot_losses({"": self.lines}, path)
        return path

    def close(self) -> None:
        if self._trackers is not None:
            self._trackers.end_training()


class NoMetrics(Metrics):
    """Of a rank that writes nothing."""

    def __init__(self) -> None:
        self.lines = []

    def add(self, line: dict[str, Any]) -> None:
        pass

    def plot(self) -> str:
        return ""

    def close(self) -> None:
        pass


def read_metrics(path: str) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last line that a killed run left half written is no line."""
    lines: list[dict[str, Any]] = []
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            for text in file:
                if text.endswith("\n"):
                    lines.append(json.loads(text))
    return lines


def _trackers(recipe: Recipe) -> Any:
    names = recipe.trackers()
    if not names:
        return None
    from accelerate import Accelerator

    # The trackers are accelerate's; of the rest of it nothing is used. Rank 0 is alone with them: told of the
    # others, accelerate would wait for them.
    hidden = {name: os.environ.pop(name) for name in _RANK_NAMES if name in os.environ}
    try:
        accelerator = Accelerator(cpu=True, log_with=names, project_dir=recipe.output_dir)
    finally:
        os.environ.update(hidden)
    missing = [name for name in names if name not in [str(known) for known in accelerator.log_with]]
    if missing:
        raise ValueError(
            f"report_to: {missing[0]} is not installed; pip install {missing[0]}, or leave it out"
        )
    wandb = {"name": recipe.wandb_name, "entity": recipe.wandb_entity}
    options = {"wandb": {name: value for name, value in wandb.items() if value}} if "wandb" in names else {}
    plain = {name: value for name, value in vars(recipe).items() if isinstance(value, int | float | str)}
    accelerator.init_trackers(recipe.wandb_project or "monograph", config=plain, init_kwargs=options)
    return accelerator


def plot_losses(
    runs: dict[str, list[dict[str, Any]]], path: str, colours: Mapping[str, str] | None = None
) -> None:
    """Draws training and evaluation losses of one or more runs to a PNG; `colours` by name of the run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, lines in runs.items():
        for kind, marker in (("loss", ""), ("eval_loss", "o")):
            points = [(line["step"], line[kind]) for line in lines if line.get(kind) is not None]
            if points:
                label = f"{name} {kind}".strip()
                colour = (colours or {}).get(name)
                axes.plot(*zip(*points, strict=True), marker=marker, linewidth=1.2, label=label, color=colour)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(path, dpi=110)
