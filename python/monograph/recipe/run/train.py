"""Steps over prepared data, evaluations, checkpoints; a resumed run gives the bits of an unbroken one."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch

from monograph.distributed.expert_adapter import whole_adapter, whole_shapes
from monograph.distributed.tree import Tree
from monograph.distributed.watchdog import barrier, by_first, together
from monograph.distributed.world import World, alone
from monograph.recipe.config.compile_options import compile_options
from monograph.recipe.config.keys import Recipe
from monograph.recipe.config.model_folder import model_folder
from monograph.recipe.config.placement import offload_folder, offload_place
from monograph.recipe.data.encode import load_tokenizer
from monograph.recipe.data.full_disk import naming_file
from monograph.recipe.data.prepare import prepare, read_prepared
from monograph.recipe.data.token_rows import check_documents
from monograph.recipe.run.agreement import Own, agree
from monograph.recipe.run.base_fingerprint import (
    config_sha256,
    is_in_parts,
    make_base_fingerprint,
    packing_of,
    write_base_fingerprint,
)
from monograph.recipe.run.batches import Batches, token_counts
from monograph.recipe.run.checkpoint import (
    checkpoint_to_resume,
    keep_last,
    load_checkpoint,
    load_state,
    optimizer_file,
    save_checkpoint,
)
from monograph.recipe.run.interrupt import Asked, Interrupt
from monograph.recipe.run.load_model import check_start, is_packed, load_model
from monograph.recipe.run.metrics import Metrics, NoMetrics
from monograph.recipe.run.outcome import Outcome
from monograph.recipe.run.output_folder import finished_run, held, set_aside
from monograph.recipe.run.progress import Reporter, peak_memory_kib
from monograph.recipe.run.ranks import check_ranks, check_same_start, idle_ranks, quiet_unless_first
from monograph.recipe.run.restarts import launch_name, own_checkpoint, restarted
from monograph.recipe.run.run_identity import compare, kernels_identity, run_identity
from monograph.recipe.run.run_output import Progress, RunOutput
from monograph.recipe.run.schedule import checkpoint_steps, evaluation_steps, learning_rate
from monograph.training import TrainStep, verify_head, verify_packing
from monograph.training.state_parts import write_parts


def train(recipe: Recipe, world: World | None = None, *, quiet: bool = False) -> Outcome:
    """Runs a recipe by Monograph's own step: `monograph.recipe.train` chooses the engine."""
    if world is not None:
        return _train(recipe, world, quiet)
    with together(recipe.ddp_timeout) as world, quiet_unless_first(world):
        return _train(recipe, world, quiet)


def _train(recipe: Recipe, world: World, quiet: bool) -> Outcome:
    check_ranks(recipe, world)
    with (
        held(recipe.output_dir) if world.first else nullcontext(),
        compile_options(recipe.torch_compile_options, recipe.torch_compile_mode),
    ):
        return make_run(recipe, world).train(quiet)


def make_run(recipe: Recipe, world: World, base: Callable[[str], Any] | None = None) -> Run:
    """Data, model and step of a recipe, ready to go. base: gives the base of a folder; None: it is loaded."""
    by_first(world, "prepare", lambda: model_folder(recipe))
    folder = model_folder(recipe)
    tokenizer = load_tokenizer(recipe, folder)
    prepared = read_prepared(by_first(world, "prepare", lambda: prepare(recipe, tokenizer).folder))
    check_documents(recipe, folder, tokenizer, [part for part in (prepared.train, prepared.eval) if part])
    return Run(recipe, tokenizer, prepared, folder, world, base)


class Run(RunOutput):
    """One run: model, step, data and position."""

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: Any,
        prepared: Any,
        folder: str,
        world: World | None = None,
        base: Callable[[str], Any] | None = None,
    ) -> None:
        self.recipe, self.tokenizer, self.prepared = recipe, tokenizer, prepared
        self.world = world or alone()
        self.batches = Batches(recipe, prepared.train, tokenizer.pad_token_id, training=True)
        self.held = (
            Batches(recipe, prepared.eval, tokenizer.pad_token_id, training=False) if prepared.eval else None
        )
        self.epochs = self.batches.epochs(recipe)
        self.last_step = self.epochs.total  # an earlier one where somebody ends it
        self.signal = 0  # one that any rank was sent
        self.told: list[str] = []  # what a resumed run does in another way
        self.resumed_at = 0
        identity = run_identity(recipe, prepared.tokens_sha256) | kernels_identity(recipe)
        identity |= config_sha256(folder)
        self.resumed = by_first(self.world, "load", self._checkpoint)
        if self.resumed:
            self.told = compare(load_state(self.resumed).get("identity", {}), identity, self.resumed)
        self.world.doing("load")
        self.model = load_model(recipe, folder, self.world, None if base is None else base(folder))
        verify_head(self.model)
        if self.batches.packing or (self.held is not None and self.held.packing):
            verify_packing(self.model)
        barrier(self.world, "load")  # one may load for longer than a collective waits
        self.step = TrainStep(
            self.model,
            mode=recipe.mode,
            dynamic=not self.batches.fixed_shape,
            betas=(recipe.adam_beta1, recipe.adam_beta2),
            eps=recipe.adam_epsilon,
            weight_decay=recipe.weight_decay,
            max_grad_norm=recipe.max_grad_norm,
            seed=recipe.seed,
            world=self.world,
            virtual_shards=recipe.leaves,
            offload=offload_place(recipe),
            offload_folder=offload_folder(recipe),
        )
        # The packed bytes of a base in parts are read by all ranks together.
        reads = self.world.first or is_in_parts(self.model)
        packed = packing_of(self.model) if reads else None
        self.base_fingerprint = by_first(self.world, "load", lambda: self._base_fingerprint(folder, packed))
        self.progress = Progress(
            order=self.batches.sampler.state_dict(0, 0),
            base_sha256=self.base_fingerprint["base"]["sha256"],
            identity=identity,
        )
        if self.resumed:
            self._resume(self.resumed)
        self.progress.launch = launch_name()
        check_same_start(self.world, self.progress.step, self.step.alike_on_ranks())
        self.told += by_first(
            self.world, "load", lambda: set_aside(recipe.output_dir, self.resumed, self.progress.step)
        )

    def _checkpoint(self) -> str | None:
        """Where the run goes on: where torchrun has ended it, or what the keys ask for."""
        recipe = self.recipe
        found = own_checkpoint(recipe.output_dir, launch_name()) if restarted() else None
        return found or checkpoint_to_resume(
            recipe.output_dir, recipe.resume_from_checkpoint, recipe.auto_resume_from_checkpoints
        )

    def _base_fingerprint(self, folder: str, packed: dict[str, Any] | None) -> dict[str, Any]:
        """Of the base of this run. An adapter that an earlier run left keeps its own until it is replaced."""
        output_dir = self.recipe.output_dir
        record = make_base_fingerprint(folder, output_dir, quantised=is_packed(self.model), packed=packed)
        if not finished_run(output_dir):
            write_base_fingerprint(record, output_dir)
        return record

    def _resume(self, folder: str) -> None:
        optimizer, state = load_checkpoint(folder)
        saved = Progress(**state)
        self.batches.sampler.load_state_dict(saved.order)  # refuses data in another order
        if saved.base_sha256 != self.progress.base_sha256:
            raise ValueError(
                f"resume_from_checkpoint: {folder} was trained on another base (hash "
                f"{saved.base_sha256[:12]}, this one has {self.progress.base_sha256[:12]})"
            )
        check_start(self.model, folder)
        self.step.load_state_dict(optimizer)
        if saved.skipped_in_a_row >= self.recipe.max_bad_steps:  # what ended that run begins anew
            saved.skipped_in_a_row = 0
        saved.identity = self.progress.identity
        self.progress, self.resumed_at = saved, saved.step
        best = self._best_folder()
        if self.recipe.load_best_model_at_end and saved.best_step and not os.path.isdir(best):
            raise ValueError(
                f"load_best_model_at_end: {best}, the best checkpoint of the run of {folder}, is missing; "
                "write load_best_model_at_end: false, or begin anew"
            )

    def train(self, quiet: bool = False) -> Outcome:
        several = self.world.size > 1
        with (
            Reporter(self.epochs.total, self.progress.step, quiet=quiet) as reporter,
            Interrupt(among_ranks=several) as interrupt,
        ):
            for _ in self.steps(reporter, interrupt):
                pass
        return self.outcome()

    def outcome(self) -> Outcome:
        progress, writes = self.progress, self.world.first
        return Outcome(
            progress.step,
            self.epochs.total,
            self.signal or None,
            progress.best_step,
            self.recipe.output_dir,
            writes,
        )

    def steps(self, reporter: Reporter, interrupt: Asked) -> Iterator[int]:
        """Trains and writes the adapter; gives the number of each step, after what follows it."""
        recipe, progress, total = self.recipe, self.progress, self.epochs.total
        evaluate_at = evaluation_steps(recipe, self.epochs)
        save_at = checkpoint_steps(recipe, self.epochs)
        several = self.world.size > 1
        metrics = self.metrics = Metrics(recipe, progress.step) if self.world.first else NoMetrics()
        if self.world.heartbeats is not None:
            self.world.heartbeats.told_to_end = lambda: interrupt.asked
        reporter.say(self._introduction())
        for line in (self.prepared.what_is_missing(), idle_ranks(recipe, self.world), *self.told):
            if line:
                reporter.say(line)
        while progress.step < self.last_step and not (self.signal if several else interrupt.signal):
            self._one_step(metrics, reporter, interrupt)
            best = self._evaluate(metrics, reporter) if progress.step in evaluate_at else False
            if (best and recipe.save_strategy != "no") or progress.step in save_at:
                self._save()
            if progress.skipped_in_a_row >= recipe.max_bad_steps:
                raise ValueError(self._bad_steps(self._save()))
            if self._stopped(reporter):
                break
            yield progress.step
        if 0 < progress.step == progress.skipped == total:
            raise ValueError(
                f"each of the {total} steps had a loss or gradient that is not finite: nothing was "
                f"learnt; saved {self._save()}"
            )
        interrupt.deaf = several
        if not several:
            self.signal = interrupt.signal or 0
        if self.signal:
            reporter.say(
                f"stopped after step {progress.step}; saved {self._save()}; go on with "
                "--resume-from-checkpoint auto"
            )
        else:
            sketches = self._calibrate(reporter)
            if not sketches:
                self._take_best()
            with whole_adapter(self.model):
                by_first(self.world, "save", lambda: self._finish(reporter, metrics.plot(), sketches))
        metrics.close()

    def _introduction(self) -> str:
        whole = whole_shapes(self.model)  # of what has its share here alone
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        trained = sum(whole.get(name, p.shape).numel() for name, p in named)
        where = f", resumed from {self.resumed}" if self.resumed else ""
        where += f"; {self.world.size} ranks" if self.world.size > 1 else ""
        return (
            f"{trained:,} trainable parameters; {self.epochs.total} steps, batch size {self.batches.rows}, "
            f"accumulation {self.batches.sampler.batches_per_step}, mode {self.step.mode}{where}"
        )

    def _one_step(self, metrics: Metrics, reporter: Reporter, interrupt: Asked) -> None:
        recipe, progress = self.recipe, self.progress
        self._mark(progress.step + 1)
        batches = self.batches.step(*self.epochs.place(progress.step))
        rate = learning_rate(recipe, progress.step, self.epochs.total)
        result = self.step(batches, rate)
        loss, norm = float(result.loss), float(result.grad_norm)
        own = Tree(len(batches), recipe.leaves).own(self.world.rank, self.world.size)
        counts = token_counts(batches[index] for index in own)
        signal, memory = interrupt.signal or 0, peak_memory_kib()
        state = self.step.fingerprint() if self.world.size > 1 else 0
        agreed = agree(self.world, Own(progress.step + 1, loss, norm, state, signal, *counts, memory))
        self.signal = agreed.signal
        scale = {} if result.loss_scale is None else {"loss_scale": float(result.loss_scale)}
        if not (math.isfinite(loss) and math.isfinite(norm)):
            # A scaled loss overflows until its scale is found; that is no bad step while the scale is large.
            searching = result.loss_scale is not None and math.isfinite(loss) and result.loss_scale >= 1
            return self._skipped(loss, norm, scale, metrics, reporter, counts=not searching)
        if norm == 0.0 and progress.step == progress.skipped:
            raise ValueError(
                "the first gradient is zero: nothing would be learnt. Are the targets of the first step "
                "empty, or do the adapted layers (lora_target_modules) not reach the output?"
            )
        progress.step += 1
        progress.skipped_in_a_row = 0
        tokens, computed, memory_gib = agreed.tokens, agreed.computed, agreed.memory / 2**20
        speed = reporter.step(loss, tokens, tokens / computed, memory_gib)
        threshold = recipe.loss_watchdog_threshold
        high = threshold is not None and loss > threshold
        progress.losses_too_high = progress.losses_too_high + 1 if high else 0
        of_all = {"memory_gib_of_all": round(agreed.memory_of_all / 2**20, 3)} if self.world.size > 1 else {}
        if progress.step % recipe.logging_steps == 0 or progress.step == self.epochs.total:
            metrics.add(
                {
                    "step": progress.step,
                    "epoch": round(self.epochs.share(progress.step), 4),
                    "loss": loss,
                    "grad_norm": norm,
                    "learning_rate": rate,
                    "tokens": tokens,
                    "targets": result.targets,
                    "packing_efficiency": round(tokens / computed, 4),
                    "tokens_per_second": round(speed, 1),
                    "memory_gib": round(memory_gib, 3),
                }
                | of_all
                | scale
            )

    def _skipped(
        self,
        loss: float,
        norm: float,
        scale: dict[str, float],
        metrics: Metrics,
        reporter: Reporter,
        *,
        counts: bool,
    ) -> None:
        """A step that changed nothing: the update leaves parameters and moments alone where the norm of the
        gradient is not finite."""
        progress = self.progress
        progress.step += 1
        progress.skipped += 1
        progress.skipped_in_a_row += counts
        what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {norm}"
        reporter.say(f"step {progress.step} skipped: {what} ({progress.skipped} so far)")
        reporter.pass_over()
        metrics.add({"step": progress.step, "skipped_steps": progress.skipped} | scale)

    def _bad_steps(self, saved: str) -> str:
        count, last = self.progress.skipped_in_a_row, self.progress.step
        return (
            f"steps {last - count + 1} to {last} had a loss or gradient that is not finite (max_bad_steps is "
            f"{self.recipe.max_bad_steps}); saved {saved}; lower learning_rate, or look at the data with "
            "`preprocess --debug`"
        )

    def _evaluate(self, metrics: Metrics, reporter: Reporter) -> bool:
        """The loss on held back documents; whether it is the best so far."""
        if self.held is None:
            return False
        progress = self.progress
        self.world.doing("evaluation")
        total, targets = self.step.evaluate_all(self.held.all())
        mean = total / max(targets, 1)
        metrics.add({"step": progress.step, "eval_loss": mean})
        best = math.isfinite(mean) and (progress.best_loss is None or mean < progress.best_loss)
        if best:
            progress.best_loss, progress.best_step = mean, progress.step
        progress.evaluations_without_best = 0 if best else progress.evaluations_without_best + 1
        reporter.say(f"step {progress.step}: eval_loss {mean:.4f}{' (best)' if best else ''}")
        return best

    def _save(self) -> str:
        """A checkpoint, by rank 0; the others wait until it has its name. Where factors of experts are cut
        they send theirs before, and rank 0 writes one after the other."""
        optimizer: Mapping[str, torch.Tensor] | str = {}
        if self.step.state.owners is not None:
            self.world.doing("save")
            output_dir = self.recipe.output_dir
            with naming_file(output_dir):
                optimizer = optimizer_file(output_dir) if self.world.first else ""
                write_parts(self.step.state_parts(), optimizer or None)
        elif self.world.first:
            optimizer = self.step.state_dict()
        with whole_adapter(self.model):
            return by_first(self.world, "save", lambda: self._write_checkpoint(optimizer))

    def _write_checkpoint(self, optimizer: Mapping[str, torch.Tensor] | str) -> str:
        recipe, progress = self.recipe, self.progress
        state = asdict(progress)
        path = save_checkpoint(
            recipe, progress.step, self.model, optimizer, state, self.base_fingerprint, self.metrics.lines
        )
        keep_last(recipe.output_dir, recipe.save_total_limit, progress.best_step)
        return path

    def _mark(self, step: int) -> None:
        if self.world.heartbeats is not None:
            self.world.heartbeats.step = step

    def _stopped(self, reporter: Reporter) -> bool:
        recipe, progress = self.recipe, self.progress
        patience = recipe.early_stopping_patience
        if patience and progress.evaluations_without_best >= patience:
            reporter.say(f"stopped: no better eval_loss in {patience} evaluations")
            return True
        if progress.losses_too_high >= recipe.loss_watchdog_patience:
            threshold = recipe.loss_watchdog_threshold
            reporter.say(f"stopped: loss above {threshold} for {recipe.loss_watchdog_patience} steps")
            return True
        return False
