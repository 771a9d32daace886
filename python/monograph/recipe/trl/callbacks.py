"""What a run under TRL writes and watches besides TRL's own: metrics.jsonl, recipe.yml, signals, losses."""

from __future__ import annotations

import json
import math
import os
from typing import Any

from transformers import TrainerCallback

from monograph.recipe.config.keys import TrlRecipe
from monograph.recipe.run.adapter_card import write_card
from monograph.recipe.run.base_fingerprint import write_base_fingerprint
from monograph.recipe.run.interrupt import Interrupt
from monograph.recipe.run.metrics import read_metrics
from monograph.recipe.run.saved_recipe import write_recipe
from monograph.recipe.trl.resumed_run import write_identity


class Records(TrainerCallback):
    """One line of metrics.jsonl per log; recipe.yml and monograph.json in every checkpoint."""

    def __init__(self, recipe: TrlRecipe, base_fingerprint: dict[str, Any], identity: dict[str, Any]) -> None:
        self._recipe, self.base_fingerprint, self._identity = recipe, base_fingerprint, identity
        self.path = os.path.join(recipe.output_dir, "metrics.jsonl")
        self.lines: list[dict[str, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.lines = [line for line in read_metrics(self.path) if line["step"] <= state.global_step]
        with open(self.path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in self.lines)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        line = {"step": state.global_step, **(logs or {})}
        if "train_runtime" in line:
            return  # the end of the run, in sums
        self.lines.append(line)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
        if os.path.isdir(folder):
            self.write_beside(folder, model)
            write_identity(self._identity, folder)

    def write_beside(self, folder: str, model: Any) -> None:
        """recipe.yml, monograph.json and the card of an adapter, beside what TRL has written."""
        write_recipe(self._recipe, folder)
        write_base_fingerprint(self.base_fingerprint, folder)
        if self._recipe.adapter is not None:
            config = model.peft_config[model.active_adapter]
            write_card(self._recipe, folder, self.base_fingerprint, config, self.lines)


class Watch(TrainerCallback):
    """Ends a run whose loss is not finite, stays above `loss_watchdog_threshold`, or that got a signal."""

    def __init__(self, recipe: TrlRecipe, interrupt: Interrupt) -> None:
        self._threshold, self._patience = recipe.loss_watchdog_threshold, recipe.loss_watchdog_patience
        self._interrupt, self._too_high = interrupt, 0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        loss = (logs or {}).get("loss")
        if loss is None:
            return
        if not math.isfinite(loss):
            raise ValueError(
                f"step {state.global_step}: loss {loss}; lower learning_rate, or look at the data with "
                "`preprocess --debug`"
            )
        high = self._threshold is not None and loss > self._threshold
        self._too_high = self._too_high + 1 if high else 0
        if self._too_high >= self._patience:
            control.should_training_stop = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._interrupt.asked:
            control.should_save = control.should_training_stop = True
