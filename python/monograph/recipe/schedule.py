"""Numbers that depend on the step alone: the learning rate, and when to evaluate and save."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from monograph.recipe.keys import Recipe


def warmup_steps(recipe: Recipe, total: int) -> int:
    if recipe.warmup_steps is not None:
        return recipe.warmup_steps
    return math.ceil((recipe.warmup_ratio or 0.0) * total)


def learning_rate(recipe: Recipe, step: int, total: int) -> float:
    """The rate of step 0 ... total - 1. A warm-up of W steps rises 1/W, 2/W, ... 1: no step has rate 0."""
    warmup = warmup_steps(recipe, total) if recipe.lr_scheduler != "constant" else 0
    if step < warmup:
        return recipe.learning_rate * (step + 1) / warmup
    if recipe.lr_scheduler.startswith("constant"):
        return recipe.learning_rate
    progress = (step - warmup) / max(1, total - warmup)
    if recipe.lr_scheduler == "linear":
        return recipe.learning_rate * (1.0 - progress)
    least = recipe.cosine_min_lr_ratio or 0.0
    return recipe.learning_rate * (least + (1.0 - least) * 0.5 * (1.0 + math.cos(math.pi * progress)))


class Epochs:
    """Steps of a run: `lengths[e]` steps in epoch e, the last perhaps cut."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.ends = [sum(lengths[: number + 1]) for number in range(len(lengths))]
        self.lengths = list(lengths)

    @property
    def total(self) -> int:
        return self.ends[-1] if self.ends else 0

    def place(self, step: int) -> tuple[int, int]:
        """(epoch, step inside it) of a step of the run."""
        epoch = bisect.bisect_right(self.ends, step)
        return epoch, step - (self.ends[epoch - 1] if epoch else 0)

    def share(self, step: int) -> float:
        """Epochs done after `step` steps."""
        epoch, inside = self.place(min(step, self.total - 1))
        return epoch + (inside + (step >= self.total)) / self.lengths[epoch]


def event_steps(epochs: Epochs, per_epoch: int | None, every: int | float | None) -> set[int]:
    """Numbers of steps done after which something happens: so many times an epoch, or every so many steps."""
    if per_epoch:
        begins = [end - length for end, length in zip(epochs.ends, epochs.lengths, strict=True)]
        return {
            begin + max(1, round(length * (turn + 1) / per_epoch))
            for begin, length in zip(begins, epochs.lengths, strict=True)
            for turn in range(per_epoch)
        }
    if every:
        distance = max(1, int(every) if every >= 1 else round(every * epochs.total))
        return set(range(distance, epochs.total + 1, distance))
    return set()
