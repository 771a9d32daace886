"""Steps of `monograph.bench step`'s quick case with and without what is looked at before each, in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM

import monograph as mg
from monograph.bench.step import cases
from monograph.distributed import World
from monograph.nn import replace_linears
from monograph.packing import PackedCollator
from monograph.training import TrainStep, micro_batches

RATE = 1e-3


def quick_step(world: World | None = None) -> tuple[TrainStep, list[dict[str, torch.Tensor]]]:
    """A step in mode `graph` and its micro-batches, one a rank."""
    case = cases(quick=True)["quick"]
    config = dict(case["config"])
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    replace_linears(model.to(torch.bfloat16), "nf4")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.manual_seed(1)
    model = mg.add_lora(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    collate = PackedCollator(max_documents=16)
    rows = []
    for _ in range(world.size if world else 1):
        documents = [torch.randint(0, config["vocab_size"], (n,)) for n in case["lengths"]]
        rows.append(collate([{"input_ids": ids} for ids in documents]))
    return TrainStep(model, mode="graph", world=world), rows


class Checks:
    """What a step on ranks looks at: identity, what ranks must have alike, the hash of micro-batch 0."""

    def __init__(self, step: TrainStep) -> None:
        self.seconds = 0.0
        self._places = [(step, "_check_identity"), (step, "_alike"), (micro_batches, "digest")]
        self._own = [getattr(owner, name) for owner, name in self._places]
        self._none: list[Callable[..., Any]] = [lambda: None, lambda rate: {}, lambda tensors: 0]

    def _timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            begin = time.process_time()
            try:
                return work(*given)
            finally:
                self.seconds += time.process_time() - begin

        return timed

    def run(self, on: bool, work: Callable[[], object]) -> float:
        """Seconds of processor time of `work`: other programs' are not counted."""
        with pytest.MonkeyPatch.context() as patch:
            for (owner, name), own, none in zip(self._places, self._own, self._none, strict=True):
                patch.setattr(owner, name, self._timed(own) if on else none)
            begin = time.process_time()
            work()
            return time.process_time() - begin


def paired(world: World, rounds: int) -> dict[str, Any]:
    """ratios: steps with the checks over steps without, of all ranks and rounds; a round is one with, two
    without, one with. Where their quartiles are not within 2 % the machine was busy with other things: of
    three such sets the one that is nearest together counts. share: of the checks in the steps that have them;
    step: the median of those without, in seconds."""
    step, rows = quick_step(world)
    checks = Checks(step)
    used, bare = 0.0, []

    def seconds(on: bool) -> float:
        return checks.run(on, lambda: step(rows, RATE))

    step(rows, RATE)
    step(rows, RATE)
    sets = []
    for _ in range(3):
        own = []
        for _ in range(rounds):
            first, second, third, last = (seconds(on) for on in (True, False, False, True))
            own.append((first + last) / (second + third))
            used += first + last
            bare += [second, third]
        sets.append([ratio for ratios in world.gathered(own) for ratio in ratios])
        if spread(sets[-1]) <= 0.02:
            break
    return {
        "ratios": min(sets, key=spread),
        "sets": len(sets),
        "share": checks.seconds / used,
        "step": statistics.median(bare),
    }


def spread(ratios: list[float]) -> float:
    low, _, high = statistics.quantiles(ratios, n=4)
    return high - low
