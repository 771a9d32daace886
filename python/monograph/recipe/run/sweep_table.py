"""What adapters have learnt, by their metrics.jsonl: a table, the best by evaluation first, and a plot."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from typing import Any

from monograph.recipe.run.metrics import plot_losses, read_metrics

RECORD = "adapters.json"
PLOT = "losses.png"


@dataclass(frozen=True)
class Learnt:
    """One adapter. eval_loss: the least, at best_step; state: as RECORD says it, or what the folder shows."""

    name: str
    step: int
    loss: float | None
    eval_loss: float | None
    best_step: int | None
    skipped: int
    state: str


def learnt(output_dir: str, name: str, state: str = "") -> Learnt:
    """What the folder of an adapter says of its run."""
    folder = os.path.join(output_dir, name)
    lines = read_metrics(os.path.join(folder, "metrics.jsonl"))
    losses = [line["loss"] for line in lines if line.get("loss") is not None]
    evaluated = [(line["eval_loss"], line["step"]) for line in lines if _is_number(line.get("eval_loss"))]
    best = min(evaluated, default=(None, None))
    skipped = max((line.get("skipped_steps", 0) for line in lines), default=0)
    if not state:
        state = "done" if os.path.isfile(os.path.join(folder, "adapter_config.json")) else "not finished"
    step = max((line["step"] for line in lines), default=0)
    return Learnt(name, step, losses[-1] if losses else None, best[0], best[1], skipped, state)


def report(output_dir: str) -> list[Learnt]:
    """All adapters below a folder, the best first: by the least eval_loss, else by the last loss."""
    states: dict[str, str] = read_record(output_dir).get("adapters", {})
    names = [name for name in states if os.path.isdir(os.path.join(output_dir, name))]
    if not names and os.path.isdir(output_dir):  # adapters that were trained one by one
        found = sorted(os.listdir(output_dir))
        names = [name for name in found if os.path.isfile(os.path.join(output_dir, name, "metrics.jsonl"))]
    rows = [learnt(output_dir, name, states.get(name, "")) for name in names]
    return sorted(rows, key=_order)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _order(row: Learnt) -> tuple[int, float]:
    for place, value in enumerate((row.eval_loss, row.loss)):
        if _is_number(value):
            return place, float(value or 0.0)
    return 2, 0.0


def table(rows: list[Learnt]) -> str:
    """Lines of text, as they are printed."""
    cells = [("adapter", "steps", "loss", "eval_loss", "at step", "skipped", "")]
    cells += [
        (
            row.name,
            str(row.step),
            _number(row.loss),
            _number(row.eval_loss),
            "" if row.best_step is None else str(row.best_step),
            str(row.skipped or ""),
            row.state,
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place in (0, 6) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def draw(output_dir: str, rows: list[Learnt]) -> str:
    """The losses of all adapters in one picture; gives its path."""
    path = os.path.join(output_dir, PLOT)
    runs = {row.name: read_metrics(os.path.join(output_dir, row.name, "metrics.jsonl")) for row in rows}
    plot_losses(runs, path)
    return path


def as_json(rows: list[Learnt]) -> str:
    return json.dumps({"schema_version": 1, "adapters": [asdict(row) for row in rows]})


def read_record(output_dir: str) -> dict[str, Any]:
    """adapters.json of a folder; empty if it has none."""
    path = os.path.join(output_dir, RECORD)
    if not os.path.isfile(path):
        return {}
    with open(path, encoding="utf-8") as file:
        found = json.load(file)
    return found if isinstance(found, dict) else {}


def write_record(output_dir: str, states: dict[str, str], ended: dict[str, int]) -> None:
    """Who is how far, and whom the sweep ended at which step; there wholly or as it was before."""
    path = os.path.join(output_dir, RECORD)
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump({"schema_version": 1, "adapters": states, "ended": ended}, file, indent=1)
    os.replace(f"{path}.new", path)
