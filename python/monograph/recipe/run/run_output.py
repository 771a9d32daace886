"""RunOutput: what a run leaves in output_dir when it ends: the adapter, its card and a calibration."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from monograph.distributed.shard import shard_group_of
from monograph.distributed.world import World
from monograph.hf.calibration import FILE as CALIBRATION
from monograph.hf.calibration import input_sketches, save_sketches
from monograph.recipe.config.keys import Recipe
from monograph.recipe.data.new_tokens import save_adapter
from monograph.recipe.run.adapter_card import write_card
from monograph.recipe.run.base_fingerprint import write_base_fingerprint
from monograph.recipe.run.batches import Batches, token_counts
from monograph.recipe.run.checkpoint import load_checkpoint, move_into, write_folder
from monograph.recipe.run.metrics import Metrics
from monograph.recipe.run.progress import Reporter
from monograph.recipe.run.saved_recipe import write_recipe
from monograph.training import TrainStep
from monograph.training.input_sketch import InputSketch


@dataclass
class Progress:
    """What a checkpoint keeps besides adapter and moments."""

    step: int = 0
    best_loss: float | None = None
    best_step: int | None = None
    evaluations_without_best: int = 0
    losses_too_high: int = 0
    skipped: int = 0  # steps whose loss or gradient was not finite
    skipped_in_a_row: int = 0
    order: dict[str, Any] = field(default_factory=dict)
    base_sha256: str = ""
    identity: dict[str, Any] = field(default_factory=dict)
    launch: str = ""  # of torchrun: after a restart the run goes on where this launch left it


class RunOutput:
    """The end of a run; `train.Run` makes what it writes."""

    recipe: Recipe
    tokenizer: Any
    world: World
    batches: Batches
    model: Any
    step: TrainStep
    metrics: Metrics
    progress: Progress
    base_fingerprint: dict[str, Any]
    resumed: str | None  # the checkpoint that the run goes on from
    resumed_at: int  # its step

    def _take_best(self) -> None:
        recipe, progress = self.recipe, self.progress
        if recipe.load_best_model_at_end and progress.best_step not in (None, progress.step):
            self.step.load_state_dict(load_checkpoint(self._best_folder())[0])

    def _best_folder(self) -> str:
        """The best checkpoint; one from before a resumed run lies beside that which it came from."""
        parent = self.recipe.output_dir
        if self.resumed and (self.progress.best_step or 0) <= self.resumed_at:
            parent = os.path.dirname(os.path.abspath(self.resumed))
        return os.path.join(parent, f"checkpoint-{self.progress.best_step}")

    def _calibrate(self, reporter: Reporter) -> dict[str, InputSketch]:
        """What layers are given on the first rows, with the adapter that is written. Ranks that share a base
        run it together."""
        wanted = self.recipe.calibration_rows
        if not wanted or not (self.world.first or shard_group_of(self.model) is not None):
            return {}
        self.world.doing("save")
        self._take_best()
        began, batches = time.monotonic(), self.batches.first(-(-wanted // self.batches.rows))
        sketches = input_sketches(self.model, batches)
        reporter.say(
            f"calibration: {len(sketches)} weights from {token_counts(batches)[0]:,} tokens in "
            f"{time.monotonic() - began:.1f} s"
        )
        return sketches

    def _finish(self, reporter: Reporter, plot: str, sketches: dict[str, InputSketch]) -> None:
        """Writes the adapter that the run was for, and a calibration or none: not that of another run."""
        recipe = self.recipe
        if not sketches:
            with suppress(FileNotFoundError):
                os.remove(os.path.join(recipe.output_dir, CALIBRATION))
        final = os.path.join(recipe.output_dir, "final")
        write_folder(final, lambda folder: self._write_adapter(folder, sketches))
        move_into(final, recipe.output_dir)
        reporter.say(f"adapter in {recipe.output_dir}; losses in {plot}")

    def _write_adapter(self, folder: str, sketches: dict[str, InputSketch]) -> None:
        save_adapter(self.model, folder)
        self.tokenizer.save_pretrained(folder)
        write_recipe(self.recipe, folder)
        write_base_fingerprint(self.base_fingerprint, folder)
        config = self.model.peft_config[self.model.active_adapter]
        write_card(self.recipe, folder, self.base_fingerprint, config, self.metrics.lines)
        if sketches:
            save_sketches(sketches, folder, self.progress.base_sha256)
