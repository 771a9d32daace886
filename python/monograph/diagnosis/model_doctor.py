"""`mg.doctor` of a model: forward and backward over batches, compiled and counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from monograph.diagnosis import regions
from monograph.diagnosis.progress import Progress
from monograph.diagnosis.report import Report, providers_of
from monograph.diagnosis.sharding import GatherCount, compare_ranks, look_at_shards, tracing_of
from monograph.diagnosis.tracing import breaks, counting, forget, packed_shapes, recompiles
from monograph.distributed.fully_sharded import refuse_fully_sharded
from monograph.distributed.world import World
from monograph.ops.providers import notes
from monograph.training.loss import forward_loss
from monograph.training.micro_batches import mark_lengths
from monograph.upstream.torch_names import counters, maybe_mark_dynamic

if TYPE_CHECKING:
    from transformers import Trainer

Loss = Callable[[nn.Module, Any], torch.Tensor]


def doctor(
    model: nn.Module | Trainer,
    batches: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    *,
    loss: Loss | None = None,
    inductor: bool = False,
    steps: int = 3,
    quiet: bool = False,
    world: World | None = None,
) -> Report:
    """Forward and backward over the batches, compiled, without changing the model.

    model: a model with an adapter, or a transformers or TRL trainer; then `steps` of its steps are run on its
    own batches, and afterwards model and trainer are as they were.
    batches: one batch, or several; with different lengths they also tell whether a new length compiles anew.
    loss: gives the loss of (model, batch); default: `forward_loss`, what `TrainStep` uses.
    inductor: also generate code, and tell how long that takes and what the compile cache had. Without it
        the step is only traced.
    quiet: say nothing on stderr while it works.
    world: the ranks that train together. All of them call it, with the same batches.
    """
    progress = Progress(not quiet)
    if not isinstance(model, nn.Module):
        if batches is not None or loss is not None:
            raise ValueError("doctor: batches and loss are for a model; a trainer has its own")
        from monograph.diagnosis.trainer_doctor import doctor_trainer

        return doctor_trainer(model, steps, inductor, progress)
    if batches is None:
        raise ValueError("doctor: batches is None, wanted one batch or several for a model")
    refuse_fully_sharded(model, "doctor")
    rows = [batches] if isinstance(batches, Mapping) else list(batches)
    if len(rows) == 1:
        rows = rows * 2
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("doctor: the model has no trainable parameter, wanted an adapter")
    compute = loss or forward_loss

    def run(batch: Any) -> torch.Tensor:
        return compute(model, batch)

    report = Report(providers=providers_of(parameters[0].device.type), notes=notes(parameters[0].device))
    gathers = GatherCount()
    was_training = model.training
    model.train()
    try:
        progress.traces(len(rows))
        regions.begin(model)
        with recompiles(report), tracing_of(model):
            _steps(run, rows, parameters, counting(model, report, progress, gathers), progress)
        report.breaks = breaks()
        look_at_shards(model, report, gathers, world)
        regions.look_inside(model, report, packed_shapes(model))
        if inductor:
            progress.generates(len(rows))
            with tracing_of(model):
                report.step_seconds = _steps(run, rows, parameters, "inductor", progress)
            report.cache_hits = counters["inductor"]["fxgraph_cache_hit"]
            report.cache_misses = counters["inductor"]["fxgraph_cache_miss"]
    finally:
        torch.compiler.reset()
        model.train(was_training)
    if world is not None:
        compare_ranks(report, world)
    return report


def _steps(
    run: Callable[[Any], torch.Tensor],
    rows: Sequence[Any],
    parameters: Sequence[torch.Tensor],
    backend: Any,
    progress: Progress,
) -> list[float]:
    """The seconds of each forward and backward; the tracer's counters are this run's afterwards."""
    forget()
    compiled = torch.compile(run, backend=backend)
    seconds = []
    for number, row in enumerate(rows, 1):
        began = time.perf_counter()
        torch.autograd.grad(compiled(_marked(row, parameters[0].device)), parameters, allow_unused=True)
        seconds.append(time.perf_counter() - began)
        progress.say(f"step {number} of {len(rows)}")
    return seconds


def _marked(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The batch on the model's device with its lengths marked as TrainStep marks them, but as a wish: other
    models may fix them."""
    marked = {
        name: value.to(device, copy=True) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }
    for value in marked.values():
        if isinstance(value, torch.Tensor):
            mark_lengths(value, maybe_mark_dynamic)
    return marked
