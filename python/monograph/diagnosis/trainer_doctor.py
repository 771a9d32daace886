"""doctor under a trainer of transformers or TRL: its own loop, data and loss; only the compiler is ours."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from monograph.diagnosis import regions
from monograph.diagnosis.progress import Progress
from monograph.diagnosis.report import Report, providers_of
from monograph.diagnosis.tracing import breaks, counting, forget, packed_shapes, recompiles
from monograph.hf.accelerate.sharding import unheeded_sharding
from monograph.hf.transformers.activation_checkpointing import (
    disable_checkpointing,
    is_checkpointing,
)
from monograph.ops.providers import notes
from monograph.upstream.accelerate_names import HUNG_ON_MODELS
from monograph.upstream.torch_names import COMPILED_CALL, counters, original_module
from monograph.upstream.trl_names import WRITTEN_INTO

if TYPE_CHECKING:
    from transformers import Trainer

# What training writes into instead of replacing: metrics of TRL, and what a callback asks for.
_WRITTEN_INTO = (*WRITTEN_INTO, "control")
# What accelerate and torch.compile hang on a model.
_HUNG_ON = ("forward", *HUNG_ON_MODELS, COMPILED_CALL)


def doctor_trainer(trainer: Trainer, steps: int, inductor: bool, progress: Progress) -> Report:
    """`steps` optimiser steps of `trainer.train()` with the model compiled as `torch_compile=True` does it,
    traced only; with `inductor` as many again with its code.

    No callback runs, so nothing is logged or saved. Afterwards the parameters, the random numbers and the
    trainer are as before. `torch_compile_mode` and `fullgraph` of the arguments do not count here.
    """
    from transformers import Trainer

    if not isinstance(trainer, Trainer):
        raise ValueError(f"doctor: got {type(trainer).__name__}, wanted a model or a transformers.Trainer")
    if steps < 1:
        raise ValueError(f"doctor: steps is {steps}, wanted 1 or more")
    model: Any = trainer.model
    where = next(model.parameters()).device
    report = Report(providers=providers_of(where.type), notes=notes(where))
    if (note := unheeded_sharding(asked=bool(trainer.args.fsdp))) is not None:
        report.notes.append(note)
        progress.say(note)
    forget()
    try:
        with _left_as_found(trainer), recompiles(report):
            progress.traces(steps)
            regions.begin(model)
            _train(trainer, steps, counting(model, report, progress), progress)
            report.breaks = breaks()
            regions.look_inside(model, report, packed_shapes(model))
        if inductor:
            forget()
            with _left_as_found(trainer):
                progress.generates(steps)
                report.step_seconds = _train(trainer, steps, "inductor", progress)
            report.cache_hits = counters["inductor"]["fxgraph_cache_hit"]
            report.cache_misses = counters["inductor"]["fxgraph_cache_miss"]
    finally:
        torch.compiler.reset()
    return report


def _train(trainer: Any, steps: int, backend: Any, progress: Progress) -> list[float]:
    """The seconds of each step."""
    from accelerate.utils import DynamoBackend
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step >= steps
            ends.append(time.perf_counter())
            progress.say(f"step {state.global_step} of {steps}")

    plugin = trainer.accelerator.state.dynamo_plugin
    configured, compiled = plugin.backend, {}
    training_step = trainer.training_step

    def step(model: torch.nn.Module, *arguments: Any, **options: Any) -> torch.Tensor:
        if model not in compiled:
            plain = original_module(model)
            vars(plain).pop(COMPILED_CALL, None)
            compiled[model] = torch.compile(plain, backend=backend, dynamic=plugin.dynamic)
        return training_step(compiled[model], *arguments, **options)

    trainer.training_step = step
    trainer.log = lambda *_, **__: None
    trainer.callback_handler.callbacks = [Stop()]
    ends = [time.perf_counter()]
    plugin.backend = DynamoBackend.NO  # the prepared model is compiled by `step`
    try:
        trainer.train()
    finally:
        plugin.backend = configured
    return [end - begin for begin, end in pairwise(ends)]


@contextmanager
def _left_as_found(trainer: Any) -> Iterator[None]:
    """Undoes what a few steps of training change: the trainer can train afterwards as if nothing had been."""
    import numpy as np

    model, handler = trainer.model, trainer.callback_handler
    fields, handled = dict(vars(trainer)), dict(vars(handler))
    fields |= {name: copy.deepcopy(fields[name]) for name in _WRITTEN_INTO if name in fields}
    hung = {name: vars(model)[name] for name in _HUNG_ON if name in vars(model)}
    kept = [(p, p.detach().clone()) for p in model.parameters() if p.requires_grad]
    optimizer = copy.deepcopy(trainer.optimizer.state_dict()) if trainer.optimizer else None
    checkpointing, training = is_checkpointing(model), model.training
    numbers, array = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(numbers)
        np.random.set_state(array)
        for target, before in ((trainer, fields), (handler, handled)):
            vars(target).clear()
            vars(target).update(before)
        for name in _HUNG_ON:
            vars(model).pop(name, None)
        vars(model).update(hung)
        with torch.no_grad():
            for parameter, value in kept:
                parameter.copy_(value)
                parameter.grad = None
        if optimizer:
            trainer.optimizer.load_state_dict(optimizer)
        if checkpointing is False and is_checkpointing(model):
            disable_checkpointing(model)
        model.train(training)
        trainer.accelerator.free_memory()
