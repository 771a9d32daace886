"""ManyStep: a step of several adapters on one base, each with the bits that its TrainStep has alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from monograph.distributed import Order, TreeSum
from monograph.hf.optimize import add_lora
from monograph.many.adapter_run import AdapterRun, check_number, check_run
from monograph.many.joined import Joined, check_joined, refuse_what_is_not_joined
from monograph.many.settings import check_settings, settings_of
from monograph.many.shared_base import refuse_what_is_no_base, with_same_base
from monograph.training import TrainStep
from monograph.training.batch_keys import Tensors
from monograph.training.loss import count_targets
from monograph.training.step import MOST_MICRO_BATCHES, StepResult

Batches = Sequence[Mapping[str, Any]]


class Slot:
    """Modules, graphs and state for adapters of one kind, one after the other."""

    def __init__(self, base: nn.Module, run: AdapterRun, mode: str, dynamic: bool) -> None:
        self.kind, self.run = run.kind(), run
        self.model = drawn(base, run)
        self.step: TrainStep = run.step(self.model, mode, dynamic)
        self.settings = settings_of(self.model)
        self._blank = {name: tensor.clone() for name, tensor in self.step.state_dict().items()}

    def take(self, base: nn.Module, run: AdapterRun) -> None:
        """Another adapter of this kind from its start: its factors, no moments, no step done."""
        made = drawn(base, run)
        fresh = {name: p for name, p in made.named_parameters() if p.requires_grad}
        start = {f"flat.{name}": fresh[name].detach().float() for name in self.step.state.names}
        self.step.load_state_dict({name: tensor.clone() for name, tensor in (self._blank | start).items()})
        self.model.peft_config["default"] = made.peft_config["default"]  # its file says how it began
        self.step.seed, self.run = run.seed, run


def drawn(base: nn.Module, run: AdapterRun) -> Any:
    """A model with a new adapter on the tensors of the base, drawn by its seed; torch's generator stays."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)
        # A copy: PEFT writes into a config what it finds in the model, and that would be another kind.
        return add_lora(with_same_base(base), copy.deepcopy(run.config))


class ManyStep:
    """One optimiser step for each adapter that is given micro-batches; the others rest.

        runs = {"law": mg.AdapterRun(LoraConfig(r=16)), "med": mg.AdapterRun(LoraConfig(r=8), seed=7)}
        step = mg.ManyStep(base, runs)
        results = step({"law": law_batches, "med": med_batches})
        step.retire("med")
        step.join("tax", mg.AdapterRun(LoraConfig(r=8)))
        step.model("law").save_pretrained("law")

    base: a model without an adapter; its tensors are shared, and nothing of it is changed. What an adapter
    becomes is what `TrainStep(add_lora(base, run.config), seed=run.seed, ...)` makes of it after
    `torch.manual_seed(run.seed)`: masters, moments, losses and norms have the same bits, whoever is beside
    it, joins or retires. A loss or gradient that is not finite skips the step of that adapter alone.

    rows: "apart" computes one adapter after the other, in every mode and for every layer. "joined" puts the
    rows of all into one batch, as PackedCollator packs them: the base is decoded once for all of them; in the
    modes graph and eager, and refused by name where it would not be right. Both give the same bits.
    mode, dynamic: those of TrainStep. Adapters of one shape share the traces of layers. One that joins takes
    the place of a retired one of its kind (AdapterRun.kind) and compiles nothing; another kind has graphs of
    its own.
    """

    def __init__(
        self,
        base: nn.Module,
        adapters: Mapping[str, AdapterRun],
        *,
        mode: str = "graph",
        dynamic: bool = True,
        rows: str = "apart",
    ) -> None:
        if rows not in ("apart", "joined"):
            raise ValueError(f"rows is {rows!r}, wanted apart or joined")
        refuse_what_is_no_base(base)
        self._rows, self._all = rows, list[Slot]()
        self._joined: Joined | None = None
        self._base, self._mode, self._dynamic = base, mode, dynamic
        self._slots: dict[str, Slot] = {}
        self._free: list[Slot] = []
        for name, run in adapters.items():
            check_run(name, run)
        for name, run in adapters.items():
            self.join(name, run)

    @property
    def names(self) -> list[str]:
        return list(self._slots)

    def join(self, name: str, run: AdapterRun) -> None:
        """A new adapter, in a free slot of its kind if there is one."""
        check_run(name, run)
        if name in self._slots:
            raise ValueError(
                f"adapter {name} is trained already; wanted another name, or retire({name!r}) before"
            )
        slot = next((slot for slot in self._free if slot.kind == run.kind()), None)
        if slot is None:
            slot = Slot(self._base, run, self._mode, self._dynamic)
            if self._rows == "joined":
                refuse_what_is_not_joined(self._base, [slot.step], self._mode)
            self._all.append(slot)
            self._joined = None  # made anew, with one kind more
        else:
            self._free.remove(slot)
            slot.take(self._base, run)
        self._slots[name] = slot

    def retire(self, name: str) -> None:
        """Frees the slot of an adapter. Save it before: the next one that joins takes its tensors."""
        self._free.append(self._slot(name))
        del self._slots[name]

    def __call__(
        self, micro_batches: Mapping[str, Batches], learning_rates: Mapping[str, float] | None = None
    ) -> dict[str, StepResult]:
        """A step of each adapter that has micro-batches, in the order in which they joined. learning_rates:
        of this step, in the place of `AdapterRun.learning_rate`."""
        rates = dict(learning_rates or {})
        for name in (*micro_batches, *rates):
            self._slot(name)
        for name, rate in rates.items():
            check_number(f"adapter {name}: learning_rate", rate)
        for name, own in micro_batches.items():
            check_batches(name, own)
        given = {name: micro_batches[name] for name in self._slots if micro_batches.get(name)}
        rates = {name: rates.get(name, self._slots[name].run.learning_rate) for name in given}
        if self._rows == "joined":
            return self._joined_step(given, rates)
        return {name: self._slots[name].step(own, learning_rate=rates[name]) for name, own in given.items()}

    def _joined_step(self, given: Mapping[str, Batches], rates: Mapping[str, float]) -> dict[str, StepResult]:
        """Turn k has the k-th micro-batch of each adapter that has one."""
        if self._joined is None:
            self._joined = Joined(self._base, [slot.step for slot in self._all], self._mode)
        steps = {name: self._slots[name].step for name in given}
        places = {name: self._all.index(self._slots[name]) for name in given}
        read, targets = dict[str, list[Tensors]](), dict[str, int]()
        for name, own in given.items():
            if len(own) > MOST_MICRO_BATCHES:
                raise ValueError(
                    f"adapter {name}: {len(own)} micro-batches, wanted 1 to {MOST_MICRO_BATCHES}"
                )
            steps[name].check()
            check_settings(name, self._slots[name].model, self._slots[name].settings)
            named = [(steps[name].read(batch, f"micro-batch {k}")) for k, batch in enumerate(own)]
            read[name] = [check_joined(name, tensors) for tensors in named]
            targets[name] = sum(map(count_targets, read[name]))
        learning = [name for name in given if targets[name]]
        sums = {name: TreeSum(_order(steps[name], len(read[name])).sums) for name in learning}
        for turn in range(max((len(read[name]) for name in learning), default=0)):
            taken = {
                places[name]: (turn, read[name][turn], float(targets[name]))
                for name in learning
                if turn < len(read[name])
            }
            found = self._joined.gradients(taken)
            for name in learning:
                if places[name] in found:
                    sums[name].add(found.pop(places[name]))
        results = {}
        for name in given:
            if not targets[name]:
                results[name] = steps[name](
                    given[name], learning_rate=rates[name]
                )  # says so, and changes nothing
                continue
            loss, norm = steps[name].apply_gradient(sums[name].parts, len(read[name]), rates[name])
            results[name] = StepResult(loss, norm, targets[name])
        return results

    def evaluate(self, name: str, batch: Mapping[str, Any]) -> tuple[torch.Tensor, int]:
        """The summed loss of one adapter over the targets of a batch, and their number."""
        return self._slot(name).step.evaluate(batch)

    def model(self, name: str) -> Any:
        """PEFT's model of one adapter, which is called `default` there, as alone."""
        return self._slot(name).model

    def step_of(self, name: str) -> TrainStep:
        return self._slot(name).step

    def state_dict(self, name: str) -> dict[str, torch.Tensor]:
        """Masters, moments and steps of one adapter: those of `TrainStep.state_dict`."""
        return self._slot(name).step.state_dict()

    def load_state_dict(self, name: str, state: dict[str, torch.Tensor]) -> None:
        """Of this adapter, alone or in any company; `AdapterRun.seed` is not in it."""
        self._slot(name).step.load_state_dict(state)

    def set_learning_rate(self, name: str, learning_rate: float) -> None:
        slot = self._slot(name)
        check_number(f"adapter {name}: learning_rate", learning_rate)
        slot.run = replace(slot.run, learning_rate=learning_rate)

    def _slot(self, name: str) -> Slot:
        if name not in self._slots:
            known = ", ".join(self._slots) or "none"
            raise ValueError(f"there is no adapter {name!r}, wanted one of {known}")
        return self._slots[name]


def _order(step: TrainStep, micro_batches: int) -> Order:
    return Order.of(micro_batches, step.virtual_shards or micro_batches, 0, 1)


def check_batches(name: str, own: Any) -> None:
    """None and an empty list let an adapter rest."""
    if own is None:
        return
    listed = isinstance(own, Sequence) and not isinstance(own, str | bytes)
    other = None if listed else own
    if listed:
        other = next((batch for batch in own if not isinstance(batch, Mapping)), None)
        listed = all(isinstance(batch, Mapping) for batch in own)
    if not listed:
        what = f"its micro-batches are or have a {type(other).__name__}"
        raise ValueError(f"adapter {name}: {what}, wanted a list of what the collators make")
