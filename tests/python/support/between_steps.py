"""A training step and plain PyTorch training beside it, while the model is changed between steps.

PYTHONPATH=python:tests/python python -m support.between_steps [MODE ...]    # prints the table of the page
"""

from __future__ import annotations

import copy
import math
import pathlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, isnan
from typing import Any

import torch
import torch._dynamo
from torch import nn

from monograph.distributed.shard_placeholder import ShardPlaceholder
from monograph.ops.seeded_dropout import seed_dropouts
from monograph.training import TrainStep, forward_loss
from monograph.training.loss import count_targets
from support.model_changes import ROWS, Row, adapter, batch, build

MODES = ("eager", "graph", "whole_step", "inductor")
RATE = 0.0625  # in float32 what it is in float64
BETAS, EPS = (0.9, 0.999), 0.125  # a large eps: a last bit of a gradient is no more in an update


class PlainAdamW:
    """The formulas of core/monograph/kernels/adamw/adamw.h by torch's operators, one rounding each; bits of
    torch.optim.AdamW are those of one build of torch."""

    def __init__(self, flat: nn.Parameter) -> None:
        self.flat, self.number = flat, 0
        self.m, self.v = torch.zeros_like(flat.data), torch.zeros_like(flat.data)

    def step(self) -> None:
        self.number += 1
        g = self.flat.grad
        assert g is not None
        self.m += (g - self.m) * (1 - BETAS[0])
        self.v = self.v * BETAS[1] + (g * (1 - BETAS[1])) * g
        # torch's own float32 root, of MKL, is not always the nearest: 0.6 % of them are a unit off.
        root = self.v.double().sqrt().float() * (1 / math.sqrt(1 - BETAS[1] ** self.number)) + EPS
        self.flat.data -= (self.m * (RATE / (1 - BETAS[0] ** self.number))) / root


class Plain:
    """loss.backward() and AdamW over the parameters behind each other in float32. The model owns its
    parameters; what others write to them counts. In float16 the loss is scaled as by torch's GradScaler."""

    def __init__(self, model: Any) -> None:
        self.model, self.steps = model, 0
        self.seed = seed_dropouts(model)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.flat = nn.Parameter(torch.cat([p.detach().float().reshape(-1) for p in self.trained]))
        self.optimizer = PlainAdamW(self.flat)
        self.scale = 2.0**16 if any(p.dtype == torch.float16 for p in model.parameters()) else 1.0

    def pieces(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        parts = self.flat.data.split([p.numel() for p in self.trained])
        return [(p, part.view(p.shape)) for p, part in zip(self.trained, parts, strict=True)]

    def _found(self, place: int, row: dict[str, torch.Tensor], targets: int) -> torch.Tensor:
        """Gradient and loss of a micro-batch."""
        self.seed.fill_(self.steps * 4096 + place)
        loss = forward_loss(self.model, row, torch.tensor(float(targets)))
        loss.backward(torch.tensor(self.scale, dtype=loss.dtype))
        parts = [torch.zeros(p.numel()) if p.grad is None else p.grad.float() for p in self.trained]
        for p in self.trained:
            p.grad = None
        return torch.cat([*(part.reshape(-1) for part in parts), loss.detach().reshape(1)])

    def __call__(self, rows: list[dict[str, torch.Tensor]]) -> float:
        self.model.train()
        for p, piece in self.pieces():
            if not torch.equal(p, piece.to(p.dtype)):
                piece.copy_(p.data)
        targets = sum(count_targets(row) for row in rows)
        found = _tree([self._found(place, row, targets) for place, row in enumerate(rows)])
        self.flat.grad = found[:-1] / self.scale
        if found.isfinite().all():
            self.optimizer.step()
            self.steps += 1
        else:
            self.scale *= 0.5
        for p, piece in self.pieces():
            p.data.copy_(piece)
        return found[-1].item()


def _tree(parts: list[torch.Tensor]) -> torch.Tensor:
    half = len(parts) // 2
    return _tree(parts[:half]) + _tree(parts[half:]) if half else parts[0]


class Ours:
    def __init__(self, model: Any, mode: str, **options: Any) -> None:
        self.step = TrainStep(model, mode=mode, betas=BETAS, eps=EPS, max_grad_norm=0.0, **options)

    def __call__(self, rows: list[dict[str, torch.Tensor]]) -> float:
        return self.step(rows, RATE).loss.item()


@dataclass(frozen=True)
class Setting:
    """What a row is run through: a mode, and the model that it changes.

    built: what the model is made with, unless the row says otherwise. ours: done to the model of the step and
    not to its twin. backend: of the step; None is the mode's own. off_by: how far losses and adapters may be
    from PyTorch's."""

    mode: str
    made: Callable[..., Any] = build
    built: dict[str, Any] = field(default_factory=dict)
    ours: Callable[[Any], Any] = lambda model: model
    options: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    alone: tuple[str, ...] = ()  # rows that cannot be undone, each with a model of its own
    off_by: float = 0.0

    def step(self, model: Any, mode: str | None = None) -> Ours:
        options = {name: value for name, value in self.options.items() if mode is None or name == "world"}
        return Ours(model, mode or self.mode, **options)

    def rows(self, number: int, model: Any) -> list[dict[str, torch.Tensor]]:
        return [batch(number + 1000 * place, model) for place in range(self.micro_batches)]


# What a refusal says, and what a cell of the page says for it; the first that fits.
REFUSALS = {
    "is another Parameter": "refused: another Parameter",
    "is trained now": "refused: trained now",
    "is frozen now": "refused: frozen now",
    "is gone": "refused: gone",
    "merged into its base": "refused: merged",
    "is disabled, wanted": "refused: disabled",
    "has a hook that came": "refused: a new hook",
    "has lost a hook": "refused: a hook is gone",
    "has a gradient hook": "refused: gradient hook",
    "has a backward hook": "refused: backward hook",
    "register_post_accumulate_grad_hook": "refused: no `.grad`",
    "draws from torch's generator": "refused: not seeded",
    "is float16 now": "refused: float16, not scaled",
    "the step was made for": "refused: dtype or shape",
    "columns, the weight has": "refused: dtype or shape",
    "a plain weight has dtype float64": "refused: float64",
    "were moved from the files": "refused: moved",
    "has no trainable parameter": "refused: nothing trained",
    "sharded": "refused: sharded",
    "the ranks have drifted apart": "refused: ranks differ",
}
SAME = "same bits"


def cell_of(told: str) -> str:
    return next((cell for part, cell in REFUSALS.items() if part in told), f"ERROR: {told[:300]}")


def _undone(model: Any) -> Callable[[], None]:
    """Gives what puts all modules, parameters, hooks and adapters back as they are now."""
    modules = [(module, dict(vars(module)), _copies(vars(module))) for module in model.modules()]
    every = [t for t in (*model.parameters(), *model.buffers()) if not isinstance(t, ShardPlaceholder)]
    tensors = [(t, t.data, t.requires_grad, [dict(hooks) for hooks in _hooks(t)]) for t in every]

    def undo() -> None:
        for module, attributes, copies in modules:
            vars(module).clear()
            vars(module).update(attributes)
            for name, value in copies.items():
                kept = attributes[name]
                kept.clear()
                kept.extend(value) if isinstance(kept, list) else kept.update(value)
        for tensor, data, requires_grad, before in tensors:
            tensor.data = data
            tensor.requires_grad_(requires_grad)
            for hooks, kept in zip(_hooks(tensor), before, strict=True):
                hooks.clear()
                hooks.update(kept)

    return undo


def _hooks(tensor: torch.Tensor) -> list[Any]:
    return [hooks or {} for hooks in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)]


def _copies(attributes: dict[str, Any]) -> dict[str, Any]:
    return {n: copy.copy(v) for n, v in attributes.items() if isinstance(v, (dict, list, set))}


def nothing(model: Any, turn: int, another: Any) -> None:
    pass


def let_go(model: Any) -> None:
    """Of hooks that no module has."""
    for handle in getattr(model, "handles", ()):
        handle.remove()


class Trained:
    """A model under a step of a mode and its twin under plain PyTorch, through one row after the other: the
    graphs of the first step are those that every change meets."""

    def __init__(self, setting: Setting, built: dict[str, Any]) -> None:
        own = setting.built | built
        self.setting, self.number = setting, 0
        self.model, self.twin = setting.ours(setting.made(**own)), setting.made(**own)
        self.ours, self.plain = setting.step(self.model), Plain(self.twin)
        self.off(nothing, self.steps(nothing))

    def steps(self, change: Row) -> list[float]:
        """The losses of two steps of ours."""
        losses = []
        for turn in (1, 2):
            change(self.model, turn, lambda: self.setting.step(self.model, "eager"))
            losses.append(self.ours(self.setting.rows(self.number + turn, self.model)))
        return losses

    def off(self, change: Row, losses: list[float]) -> float:
        """How far these losses and the adapters are from PyTorch's; NaN is far."""
        found = []
        for turn, loss in enumerate(losses, 1):
            change(self.twin, turn, lambda: Plain(self.twin))
            theirs = self.plain(self.setting.rows(self.number + turn, self.twin))
            found.append(0.0 if loss == theirs else abs(loss - theirs))
        let_go(self.twin)
        self.number += 2
        mine, their = adapter(self.model), adapter(self.twin)
        found += [(mine[name].float() - their[name].float()).abs().max().item() for name in their]
        return max(inf if isnan(one) else one for one in found)

    def outcome(self, change: Row) -> str:
        undo = _undone(self.model)
        try:
            losses = self.steps(change)
        except (RuntimeError, ValueError) as error:
            told = str(error)
            let_go(self.model)
            undo()
            return cell_of(told)
        let_go(self.model)
        off = self.off(change, losses)
        return SAME if off <= self.setting.off_by else f"SILENT: off by {off:.3g}"


def outcomes(setting: Setting, only: Sequence[str] = ()) -> dict[str, str]:
    """The cells of a column; only: of these rows."""
    found: dict[str, str] = {}
    groups: dict[str, list[str]] = {}
    for text in only or ROWS:
        groups.setdefault(text if text in setting.alone else str(ROWS[text][1]), []).append(text)
    with torch._dynamo.config.patch(recompile_limit=64):
        for texts in groups.values():
            step = Trained(setting, ROWS[texts[0]][1])
            for text in texts:
                found[text] = step.outcome(ROWS[text][0])
                print(f"{setting.mode}: {text}: {found[text]}", file=sys.stderr, flush=True)
    return {text: found[text] for text in only or ROWS}


def of_mode(mode: str) -> Setting:
    """With the backend `aot_eager`: the tracer and its guards; Inductor's code rounds in its own way."""
    return Setting(mode, options={"backend": "aot_eager"} if mode == "inductor" else {})


PAGE = pathlib.Path(__file__).parents[3] / "docs" / "reference" / "training.md"


def page() -> dict[str, dict[str, str]]:
    """The cells of the page, by mode and row."""
    text = PAGE.read_text(encoding="utf-8").partition("| between two steps | ")[2].partition("\n\n")[0]
    head, _, *lines = text.split("\n")
    modes = [mode.strip(" `") for mode in head.strip("| ").split("|")]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return {mode: {row[0]: row[1 + place] for row in rows} for place, mode in enumerate(modes)}


def table(columns: dict[str, dict[str, str]]) -> list[str]:
    named = " | ".join(f"`{mode}`" for mode in columns)
    lines = [f"| between two steps | {named} |", "|---" * (len(columns) + 1) + "|"]
    return lines + [f"| {text} | {' | '.join(cells[text] for cells in columns.values())} |" for text in ROWS]


if __name__ == "__main__":
    modes = sys.argv[1:] or MODES
    print("\n".join(table({mode: outcomes(of_mode(mode)) for mode in modes})))
