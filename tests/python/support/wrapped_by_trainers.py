"""Rows of shard_table.py: what wraps a model. Each gives a cell, or raises."""

from __future__ import annotations

import contextlib
import io
import pathlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import monograph as mg
from monograph.distributed import share_base
from monograph.packing import PaddedCollator
from monograph.training.regions import make_regions, region_layers
from support.sharded_cases import batch, same_bits
from support.trl_runs import tokenizer
from support.wrapped_case import OTHER, SAME, Case, equal, gradients, logits


class Around(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, **given: Any) -> Any:
        return self.inner(**given)


def ddp(case: Case, around: Any = lambda model: model) -> str:
    model, whole = case.model(), case.whole()
    wrapped, reference = DistributedDataParallel(around(model)), DistributedDataParallel(whole)
    if case.as_whole(model) != SAME:
        return OTHER
    rank = case.world.rank
    return equal(gradients(model, wrapped, rank), gradients(whole, reference, rank))


def ddp_around(case: Case) -> str:
    return ddp(case, Around)


def ddp_before(case: Case) -> str:
    model, whole = case.whole(), case.whole()
    wrapped, reference = DistributedDataParallel(model), DistributedDataParallel(whole)
    case.shard(model)
    rank = case.world.rank
    return equal(gradients(model, wrapped, rank), gradients(whole, reference, rank))


def cut_by_torch(case: Case) -> str:
    model = case.model()
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)
    return case.as_whole(model)


def cut_by_torch_before(case: Case) -> str:
    model = case.whole()
    fully_shard(model)
    return case.as_whole(case.shard(model))


def shared_base(case: Case) -> str:
    model = case.model()
    share_base(model, case.world)
    return case.as_whole(DistributedDataParallel(model))


def trainer_arguments(output: pathlib.Path, **change: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"output_dir": str(output), "max_steps": 2, "per_device_train_batch_size": 2}
    given |= {"learning_rate": 1e-2, "save_strategy": "no", "report_to": [], "use_cpu": True, "bf16": False}
    given |= {"disable_tqdm": True, "remove_unused_columns": False}
    given |= {"train_sampling_strategy": "sequential", "logging_steps": 1}
    return given | change


def trained(case: Case, model: Any, name: str, resume: bool = False, **change: Any) -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    rows = [{key: tensor[0] for key, tensor in batch(seed, rows=1).items()} for seed in range(16)]
    output = case.path(name, of_rank=False)
    with contextlib.redirect_stdout(io.StringIO()):
        arguments = TrainingArguments(**trainer_arguments(output, **change))
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train(resume_from_checkpoint=str(output / "checkpoint-1") if resume else None)
    assert isinstance(trainer.model_wrapped, DistributedDataParallel)
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def trainer(case: Case) -> str:
    got = trained(case, case.model(), "trainer")
    return equal(got, trained(case, case.whole(), "trainer-whole"))


def trainer_regions(case: Case) -> str:
    found = []
    for name, model in (("regions", case.model()), ("regions-whole", case.whole())):
        make_regions(model)
        found.append(trained(case, model, name))
        assert region_layers(model)
    return equal(*found)


def trl_trainer(case: Case, optimized: bool = False) -> str:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [{key: tensor[0].tolist() for key, tensor in batch(seed, rows=1).items()} for seed in range(16)]
    found = []
    for name, model in (("trl", case.model()), ("trl-whole", case.whole())):
        given = trainer_arguments(case.path(name, of_rank=False)) | {"max_length": 64}
        config = SFTConfig(**given, dataset_kwargs={"skip_prepare_dataset": True})
        with contextlib.redirect_stdout(io.StringIO()):
            made = SFTTrainer(
                model=model,
                args=config,
                train_dataset=Dataset.from_list(rows),
                data_collator=PaddedCollator(),
                processing_class=tokenizer(),
            )
            if optimized:
                mg.optimize(model)
            made.train()
        assert isinstance(made.model_wrapped, DistributedDataParallel)
        found.append({name: p.detach() for name, p in model.named_parameters() if p.requires_grad})
    return equal(*found)


def trl_optimized(case: Case) -> str:
    return trl_trainer(case, optimized=True)


def trainer_resumed(case: Case) -> str:
    whole = trained(case, case.whole(), "trainer-2")
    trained(case, case.model(), "trainer-1", save_strategy="steps", save_steps=1, max_steps=2)
    case.world.barrier()
    return equal(trained(case, case.model(), "trainer-1", resume=True), whole)


def accelerated(case: Case, model: Any) -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    wrapped, optimizer = accelerator.prepare(model.train(), optimizer)
    for number in range(2):
        accelerator.backward(wrapped(**batch(2 * number + case.world.rank), use_cache=False).loss)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator, wrapped


def accelerate_loop(case: Case) -> str:
    found = []
    for model in (case.model(), case.whole()):
        _, wrapped = accelerated(case, model)
        assert isinstance(wrapped, DistributedDataParallel)
        found.append({name: p.detach() for name, p in model.named_parameters() if p.requires_grad})
    return equal(*found)


def accelerate_state(case: Case) -> str:
    model, folder = case.model(), str(case.path("accelerate", of_rank=False))
    accelerator, _ = accelerated(case, model)
    want = logits(model)
    accelerator.save_state(folder)
    case.world.barrier()  # rank 0 writes
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1).view(torch.uint8).add_(1)
    accelerator.load_state(folder)
    return SAME if same_bits(logits(model), want) else OTHER


ROWS: dict[str, Callable[[Case], str]] = {
    "`DistributedDataParallel(model)`, forward and gradients": ddp,
    "the same around a module that holds the model": ddp_around,
    "`DistributedDataParallel` first, then `mg.shard`": ddp_before,
    "`share_base`, then `DistributedDataParallel`": shared_base,
    "`fully_shard` after `mg.shard`": cut_by_torch,
    "`fully_shard` first, then `mg.shard`": cut_by_torch_before,
    "`transformers.Trainer`, 2 steps: the adapter": trainer,
    "the same with regions": trainer_regions,
    "the same, resumed from its checkpoint": trainer_resumed,
    "TRL's `SFTTrainer` with its own head": trl_trainer,
    "the same after `mg.optimize(trainer.model)`: the adapter": trl_optimized,
    "accelerate: `prepare`, 2 steps: the adapter": accelerate_loop,
    "accelerate: `save_state`": accelerate_state,
}
