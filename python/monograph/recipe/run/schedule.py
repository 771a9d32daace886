"""Numbers that depend on the step alone: the learning rate, and when to evaluate and save."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from monograph.recipe.config.keys import Recipe


def warmup_steps(recipe: Recipe, total: int) -> int:
    steps = recipe.warmup_steps
    if steps is not None and steps >= 1:
        return int(steps)
    return math.ceil((recipe.warmup_ratio or steps or 0.0) * total)


def learning_rate(recipe: Recipe, step: int, total: int) -> float:
    """The rate of step 0 ... total - 1. A warm-up of W steps rises 1/W, 2/W, ... 1: no step has rate 0."""
    warmup = warmup_steps(recipe, total) if recipe.lr_scheduler != "constant" else 0
    if step < warmup:
        return recipe.learning_rate * (step + 1) / warmup
    if recipe.lr_scheduler.startswith("constant"):
        return recipe.learning_rate
    return recipe.learning_rate * _decayed(recipe, step, warmup, total)


def _decayed(recipe: Recipe, step: int, warmup: int, total: int) -> float:
    """The share of the peak after the warm-up, as transformers' schedules of these names have it."""
    progress = (step - warmup) / max(1, total - warmup)
    least = recipe.cosine_min_lr_ratio or 0.0
    if recipe.lr_scheduler == "linear":
        return 1.0 - progress
    if recipe.lr_scheduler == "rex":
        return rex(progress, least)
    if recipe.lr_scheduler == "inverse_sqrt":
        scale = warmup or 10_000
        return 1.0 / math.sqrt((step + scale - warmup) / scale)
    if recipe.lr_scheduler in ("wsd", "warmup_stable_decay"):
        decay = math.ceil(total / 10)
        progress = max(0.0, (step - (total - decay)) / decay)
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return least + (1.0 - least) * 0.5 * (1.0 + math.cos(math.pi * progress))


def rex(progress: float, least: float) -> float:
    """REX (arXiv 2107.04197) with axolotl's constants: high for long, and down to `least` at the end."""
    left = 1.0 - progress
    return least + (1.0 - least) * left / (0.1 + 0.9 * left)


class Epochs:
    """Steps of a run: `lengths[e]` steps in epoch e, the last perhaps cut from `last_whole` steps."""

    def __init__(self, lengths: Sequence[int], last_whole: int | None = None) -> None:
        self.ends = [sum(lengths[: number + 1]) for number in range(len(lengths))]
        self.lengths = list(lengths)
        self._whole = [*self.lengths[:-1], last_whole or self.lengths[-1]] if self.lengths else []

    @property
    def total(self) -> int:
        return self.ends[-1] if self.ends else 0

    def place(self, step: int) -> tuple[int, int]:
        """(epoch, step inside it) of a step of the run."""
        epoch = bisect.bisect_right(self.ends, step)
        return epoch, step - (self.ends[epoch - 1] if epoch else 0)

    def share(self, step: int) -> float:
        """Epochs done after `step` steps: 0.5 is half of the data, also where the run ends there."""
        epoch, inside = self.place(min(step, self.total - 1))
        return epoch + (inside + (step >= self.total)) / self._whole[epoch]


def evaluation_steps(recipe: Recipe, epochs: Epochs) -> set[int]:
    """Steps after which a run evaluates."""
    if recipe.eval_strategy == "no":
        return set()
    per_epoch = 1 if recipe.eval_strategy == "epoch" else recipe.evals_per_epoch
    return event_steps(epochs, per_epoch, recipe.eval_steps)


def checkpoint_steps(recipe: Recipe, epochs: Epochs) -> set[int]:
    """Steps after which a run saves, whatever its evaluations say; once an epoch if nothing is written."""
    if recipe.save_strategy in ("no", "best"):
        return {1} if recipe.save_first_step else set()
    per_epoch = recipe.saves_per_epoch or (None if recipe.save_steps else 1)
    found = event_steps(epochs, per_epoch, recipe.save_steps)
    return found | ({1} if recipe.save_first_step else set())


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
