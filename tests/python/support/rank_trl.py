"""Run on ranks by test_trainers_ranks.py: whole runs of SFT, their losses, checkpoints and sharding."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from datasets import Dataset
from peft import LoraConfig
from torch.nn.parallel import DistributedDataParallel

import monograph as mg
from monograph.distributed import World
from monograph.hf.accelerate.sharding import ASKED
from support.rank_trainers import (
    Seen,
    alone,
    base_of,
    bases,
    ddp_cases,
    dealt,
    documents,
    make,
    parameters,
    plain_ddp,
    quiet,
    same_bits,
    whole,
)


def losses_of(world: World, folder: str, output: str, ours: Any, **change: Any) -> Any:
    """Logged losses, metrics and trained adapters of three steps of SFT on padded rows."""
    with quiet():
        torch.manual_seed(5)
        trainer = make(
            "sft", base_of(folder), "padded", output, **({"max_steps": 2, "learning_rate": 1e-3} | change)
        )
        mean = mean_loss(trainer.model, dealt(world, "padded", world.size))
        if ours:
            mg.optimize(trainer.model)
        trainer.train()
        keys = ("loss", "grad_norm", "mean_token_accuracy", "num_tokens", "entropy")
        log = [{k: e[k] for k in keys} for e in trainer.state.log_history if "grad_norm" in e]
        evaluated = trainer.evaluate(Dataset.from_list(documents((6, 17, 11, 8))))
        return {"log": log, "eval": evaluated["eval_loss"], "mean": mean}


def mean_loss(model: Any, batches: Any) -> float:
    """The mean over all targets, from logits in float64."""
    total, count = 0.0, 0
    model.eval()
    with torch.no_grad():
        for given in batches:
            keys = ("input_ids", "attention_mask", "position_ids")
            logits = model(**{k: given[k] for k in keys}).logits[:, :-1].double()
            labels = given["labels"][:, 1:]
            each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
            total, count = total + float(each.sum()), count + int((labels != -100).sum())
    return total / count


def whole_runs(world: World, folder: str, output: str) -> Any:
    """SFT as people run it: losses against TRL's own head and layers, checkpoints, unheeded FSDP."""
    found = {}
    for tokens in (True, False):
        for ours in (False, True):
            change = {"average_tokens_across_devices": tokens}
            found[f"tokens={tokens} ours={ours}"] = losses_of(world, folder, output, ours, **change)
    found["resume"] = resumed(world, folder, output)
    found["fsdp"] = asked_for_fsdp(world, folder, output)
    return found


def resumed(world: World, folder: str, output: str) -> Any:
    runs = []
    for start in (None, f"{output}/run/checkpoint-2"):
        with quiet():
            torch.manual_seed(5)
            change: dict[str, Any] = {
                "max_steps": 4,
                "save_strategy": "steps",
                "save_steps": 2,
                "learning_rate": 1e-3,
            }
            lora = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.2, task_type="CAUSAL_LM")
            trainer = make("sft", base_of(folder), "packed", f"{output}/run", lora, **change)
            mg.optimize(trainer.model)
            trainer.train(resume_from_checkpoint=start)
            losses = [e["loss"] for e in trainer.state.log_history if "grad_norm" in e]
            runs.append((losses, {n: p.detach().clone() for n, p in parameters(trainer.model).items()}))
    (losses, trained), (again, parameters_again) = runs
    ranks = world.gathered({n: p for n, p in parameters_again.items()})
    return {
        "losses": [losses, again],
        "same": all(torch.equal(parameters_again[n], p) for n, p in trained.items()),
        "ranks": all(torch.equal(ranks[0][n], p) for n, p in parameters_again.items()),
    }


def asked_for_fsdp(world: World, folder: str, output: str) -> Any:
    said: list[str] = []

    class Hear(logging.Handler):
        def emit(self, record: Any) -> None:
            said.append(record.getMessage())

    hear = Hear()
    logging.getLogger("monograph").addHandler(hear)
    try:
        with quiet():
            before = make("sft", base_of(folder), "padded", output)
            mg.optimize(before.model)
            without = list(said)
            change: dict[str, Any] = {
                "fsdp": "full_shard",
                "fsdp_config": {"fsdp_version": 2},
                "learning_rate": 1e-3,
            }
            trainer = make("sft", base_of(folder), "padded", output, **change)
            mg.optimize(trainer.model)
            report = mg.doctor(trainer, steps=1, quiet=True)
            trainer.train()
    finally:
        os.environ.pop(ASKED, None)
        logging.getLogger("monograph").removeHandler(hear)
    return {
        "before": [text for text in without if "FSDP" in text],
        "warned": [text for text in said if "FSDP" in text],
        "notes": report.notes,
        "graphs": report.graphs,
        "said": str(report),
        "ddp": isinstance(trainer.model_wrapped, DistributedDataParallel),
    }


def under_fsdp2(world: World, folder: str, output: str) -> Any:
    """accelerate's FSDP2 below both trainers. On a CPU it never takes that road, so it is put on it."""
    found: dict[str, Any] = {}
    for kind in ("hf", "sft"):
        torch.manual_seed(0)
        with quiet():
            trainer = make(kind, base_of(folder), "packed", output)
            mg.optimize(trainer.model)
            batches = dealt(world, "packed", world.size)
            want = alone(kind, trainer.model, batches)
            start = {name: p.detach().clone() for name, p in parameters(trainer.model).items()}
            state = trainer.accelerator.state
            before = state.distributed_type
            state.distributed_type = DistributedType.FSDP
            state.fsdp_plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                state_dict_type="FULL_STATE_DICT",
                cpu_ram_efficient_loading=False,
            )
            trainer.is_fsdp_enabled = True
            seen = Seen(trainer)
            try:
                trainer.train()
            finally:
                state.distributed_type = before
            world.barrier()
        packed = [p for p in trainer.model.parameters() if p.dtype == torch.uint8]
        found[kind] = {
            "differs": same_bits(seen.gradients, want),
            "distance": max(float((seen.gradients[n] - g).norm() / g.norm()) for n, g in want.items()),
            "share": sum(p.to_local().numel() for p in packed) / sum(p.numel() for p in packed),
            "unmoved": all(torch.equal(whole(p), start[n]) for n, p in parameters(trainer.model).items()),
        }
    return found


def all_cases(world: World, folder: str, experts_folder: str, large_folder: str, output: str) -> Any:
    """One start of the ranks for all of test_trainers_ranks.py."""
    return {
        "ddp": ddp_cases(world, folder, experts_folder),
        "options": plain_ddp(world, folder),
        "bases": bases(world, large_folder),
        "runs": whole_runs(world, folder, output),
        "fsdp2": under_fsdp2(world, folder, output),
    }
