"""StepState: what a training step has learnt, to be saved, loaded and compared between ranks."""

from __future__ import annotations

import torch

from monograph.distributed.replica_check import fingerprint
from monograph.training.flat_parameters import FlatParameters
from monograph.training.loss_scale import LossScale
from monograph.training.state_parts import StatePart, made, part_of


class StepState:
    """Of `TrainStep`, which sets the attributes."""

    state: FlatParameters
    loss_scale: LossScale | None

    def fingerprint(self) -> int:
        """Of the trained parameters, the same on all ranks. A collective where factors of experts are cut."""
        found, owners = fingerprint(self.state.shared(self.state.flat)), self.state.owners
        if owners is None:
            return found
        own = torch.tensor([fingerprint(self.state.own(self.state.flat))])
        return hash((found, *owners.gathered(own)[:, 0].tolist())) >> 1

    def alike_on_ranks(self) -> dict[str, torch.Tensor]:
        """The state without shares of factors, for which a number of each owner stands. A collective where
        they are cut."""
        state = self.state
        parts = {"flat": state.flat, "exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
        found = {name: state.shared(part) for name, part in parts.items()} | {"steps": state.steps}
        found |= {} if self.loss_scale is None else self.loss_scale.state_dict()
        if state.owners is not None:
            own = torch.tensor([fingerprint(state.own(part)) for part in parts.values()])
            found["owners"] = state.owners.gathered(own)
        return found

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Whole, of any number of ranks. Where factors of experts are cut it is a collective, and only rank 0
        has all of it."""
        return made(self.state_parts())

    def state_parts(self) -> list[StatePart]:
        """What `state_dict` has, each part made when it is asked for, in one order on every rank."""
        scale = {} if self.loss_scale is None else self.loss_scale.state_dict()
        return self.state.state_parts() + [part_of(name, value) for name, value in scale.items()]

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        own = {} if self.loss_scale is None else self.loss_scale.state_dict()
        if missing := sorted(own.keys() - state.keys()):
            raise ValueError(f"optimizer state: missing {missing}, which a run with a scaled loss has")
        self.state.load_state_dict({name: value for name, value in state.items() if name not in own})
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(state)
