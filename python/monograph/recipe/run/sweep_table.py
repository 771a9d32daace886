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
    lines = _metrics(folder)
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
    states = read_record(output_dir).get("adapters", {})
    names = [name for name in states if os.path.isdir(os.path.join(output_dir, name))]
    if not names and os.path.isdir(output_dir):  # adapters that were trained one by one
        found = sorted(os.listdir(output_dir))
        names = [name for name in found if os.path.isfile(os.path.join(output_dir, name, "metrics.jsonl"))]
    rows = [learnt(output_dir, name, states.get(name, "")) for name in names]
    return sorted(rows, key=_order)


def _metrics(folder: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl. ValueError that names the line if it is none of a run."""
    path = os.path.join(folder, "metrics.jsonl")
    try:
        lines = read_metrics(path)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no file of JSON lines: {error}") from error
    for number, line in enumerate(lines, 1):
        if not isinstance(line, dict) or type(line.get("step")) is not int:
            raise ValueError(f"{path}: line {number} is {_short(line)}, wanted an object with a whole step")
        for key in ("loss", "eval_loss", "skipped_steps"):
            value = line.get(key)
            if value is not None and type(value) not in (int, float):
                raise ValueError(f"{path}: {key} in line {number} is {_short(value)}, wanted a number")
    return lines


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_number(value: Any) -> bool:
    return value is not None and math.isfinite(value)


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
    runs = {row.name: _metrics(os.path.join(output_dir, row.name)) for row in rows}
    plot_losses(runs, path)
    return path


def as_json(rows: list[Learnt]) -> str:
    """A last loss that is not finite is null: JSON has no word for it."""
    found = [asdict(row) | {"loss": row.loss if _is_number(row.loss) else None} for row in rows]
    return json.dumps({"schema_version": 1, "adapters": found}, allow_nan=False)


def read_record(output_dir: str) -> dict[str, Any]:
    """adapters.json of a folder; empty if it has none. ValueError if it is another file of that name."""
    path = os.path.join(output_dir, RECORD)
    if not os.path.isfile(path):
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    for key, kind in (("adapters", str), ("ended", int)):
        part = found.get(key, {}) if isinstance(found, dict) else found
        if not isinstance(part, dict) or any(type(value) is not kind for value in part.values()):
            what = "a word for each" if kind is str else "a step for each"
            raise ValueError(f"{path}: {key} is {_short(part)}, wanted names of adapters with {what}")
        if wrong := [name for name in part if os.path.basename(name) != name or name in ("", ".", "..")]:
            raise ValueError(f"{path}: {key} has {wrong[0]!r}, wanted names of folders beside the file")
    return dict(found)


def write_record(output_dir: str, states: dict[str, str], ended: dict[str, int]) -> None:
    """Who is how far, and whom the sweep ended at which step; there wholly or as it was before."""
    path = os.path.join(output_dir, RECORD)
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump({"schema_version": 1, "adapters": states, "ended": ended}, file, indent=1)
    os.replace(f"{path}.new", path)
