"""A training step and plain PyTorch training beside it, while the model is changed between steps.

PYTHONPATH=python:tests/python python -m support.between_steps [MODE ...]    # prints the table of the page
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from math import inf, isnan
from typing import Any

import torch
import torch._dynamo
from torch import nn

from monograph.ops.seeded_dropout import seed_dropouts
from monograph.training import TrainStep, forward_loss
from monograph.training.loss import count_targets
from support.model_changes import ROWS, Row, adapter, batch, build

MODES = ("eager", "graph", "whole_step", "inductor")
RATE = 0.0625  # in float32 what it is in float64
BETAS, EPS = (0.9, 0.999), 0.125  # a large eps: a last bit of a gradient is no more in an update


class Plain:
    """loss.backward() and torch.optim.AdamW, fused, over the parameters behind each other in float32: its
    kernel rounds what does not fill a vector in another way. The model owns its parameters; what others
    write to them counts."""

    def __init__(self, model: Any) -> None:
        self.model, self.steps = model, 0
        self.seed = seed_dropouts(model)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.flat = nn.Parameter(torch.cat([p.detach().float().reshape(-1) for p in self.trained]))
        self.optimizer = torch.optim.AdamW(
            [self.flat], lr=RATE, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True
        )

    def pieces(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        parts = self.flat.data.split([p.numel() for p in self.trained])
        return [(p, part.view(p.shape)) for p, part in zip(self.trained, parts, strict=True)]

    def __call__(self, row: dict[str, torch.Tensor]) -> float:
        self.model.train()
        self.seed.fill_(self.steps * 4096)
        for p, piece in self.pieces():
            if not torch.equal(p, piece.to(p.dtype)):
                piece.copy_(p.data)
        loss = forward_loss(self.model, row, torch.tensor(float(count_targets(row))))
        loss.backward()
        self.flat.grad = torch.cat([p.grad.float().reshape(-1) for p in self.trained])
        self.optimizer.step()
        self.steps += 1
        for p, piece in self.pieces():
            p.data.copy_(piece)
            p.grad = None
        return loss.item()


class Ours:
    def __init__(self, model: Any, mode: str, **options: Any) -> None:
        self.step = TrainStep(model, mode=mode, betas=BETAS, eps=EPS, max_grad_norm=0.0, **options)

    def __call__(self, row: dict[str, torch.Tensor]) -> float:
        return self.step([row], RATE).loss.item()


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
    "register_post_accumulate_grad_hook": "refused: no `.grad`",
    "draws from torch's generator": "refused: not seeded",
    "the step was made for": "refused: dtype or shape",
}
SAME = "same bits"


def _undone(model: Any) -> Callable[[], None]:
    """Gives what puts all modules, parameters, hooks and adapters back as they are now."""
    modules = [(module, dict(vars(module)), _copies(vars(module))) for module in model.modules()]
    every = (*model.parameters(), *model.buffers())
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

    def __init__(self, mode: str, built: dict[str, Any], **options: Any) -> None:
        made = built.get("made", build)
        own = {name: value for name, value in built.items() if name != "made"}
        self.model, self.twin = made(**own), made(**own)
        self.ours, self.plain = Ours(self.model, mode, **options), Plain(self.twin)
        self.number = 0
        self.off(nothing, self.steps(nothing))

    def steps(self, change: Row) -> list[float]:
        """The losses of two steps of ours."""
        losses = []
        for turn in (1, 2):
            change(self.model, turn, lambda: Ours(self.model, "eager"))
            losses.append(self.ours(batch(self.number + turn)))
        return losses

    def off(self, change: Row, losses: list[float]) -> float:
        """How far these losses and the adapters are from PyTorch's; NaN is far."""
        found = []
        for turn, loss in enumerate(losses, 1):
            change(self.twin, turn, lambda: Plain(self.twin))
            found.append(abs(loss - self.plain(batch(self.number + turn))))
        let_go(self.twin)
        self.number += 2
        ours, theirs = adapter(self.model), adapter(self.twin)
        found += [(ours[name].float() - theirs[name].float()).abs().max().item() for name in theirs]
        return max(inf if isnan(one) else one for one in found)

    def outcome(self, change: Row) -> str:
        undo = _undone(self.model)
        try:
            losses = self.steps(change)
        except (RuntimeError, ValueError) as error:
            told = str(error)
            let_go(self.model)
            undo()
            return next((cell for part, cell in REFUSALS.items() if part in told), f"ERROR: {told[:300]}")
        let_go(self.model)
        off = self.off(change, losses)
        return SAME if off == 0 else f"SILENT: off by {off:.3g}"


def outcomes(mode: str, **options: Any) -> dict[str, str]:
    """The cells of a column."""
    found: dict[str, str] = {}
    groups: dict[str, list[str]] = {}
    for text, (_, built) in ROWS.items():
        groups.setdefault(str(built), []).append(text)
    with torch._dynamo.config.patch(recompile_limit=64):
        for texts in groups.values():
            step = Trained(mode, ROWS[texts[0]][1], **options)
            for text in texts:
                found[text] = step.outcome(ROWS[text][0])
                print(f"{mode}: {text}: {found[text]}", file=sys.stderr, flush=True)
    return found


def options_of(mode: str) -> dict[str, Any]:
    """The tracer and its guards; Inductor's code rounds in its own way."""
    return {"backend": "aot_eager"} if mode == "inductor" else {}


def table(columns: dict[str, dict[str, str]]) -> list[str]:
    named = " | ".join(f"`{mode}`" for mode in columns)
    lines = [f"| between two steps | {named} |", "|---" * (len(columns) + 1) + "|"]
    return lines + [f"| {text} | {' | '.join(cells[text] for cells in columns.values())} |" for text in ROWS]


if __name__ == "__main__":
    modes = sys.argv[1:] or MODES
    print("\n".join(table({mode: outcomes(mode, **options_of(mode)) for mode in modes})))
