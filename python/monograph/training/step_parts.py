"""StepParts: the halves of a training step one by one: gradients, and when somebody says so the update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from monograph.distributed import Order, World
from monograph.training.batch_keys import BatchKeys, Tensors
from monograph.training.flat_parameters import FlatParameters
from monograph.training.loss import count_targets

Hyper = tuple[tuple[float, float], float, float, float]  # betas, eps, weight decay, norm to clip to


class StepParts:
    """Of `TrainStep`, which sets the attributes. Of one process."""

    model: nn.Module
    state: FlatParameters
    world: World
    _keys: BatchKeys
    _rows: int
    _order: Order
    _hyper: Hyper
    dropout_seed: torch.Tensor

    def gradient_of(
        self, batch: Mapping[str, Any], index: int, divisor: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        """What a micro-batch adds to a step (gradient, loss and zeros), and how many targets it has.
        index: its number in the step; divisor: of the losses, float32 []."""
        self._one_process()
        self._check_identity()
        tensors = self._keys(batch)
        self._rows = self._rows or tensors["input_ids"].shape[0]
        targets = count_targets(tensors)
        self.model.train()
        return self.micro_batch_gradient(index, self._tensors(tensors), divisor), targets

    def check(self) -> None:
        """Raises if the model is no longer the one that the step was made for."""
        self._one_process()
        self._check_identity()

    def read(self, batch: Mapping[str, Any], where: str) -> Tensors:
        """What the model is given of a micro-batch."""
        return self._keys(batch, where)

    def seed_of(self, index: int) -> torch.Tensor:
        """What the dropouts of micro-batch `index` of the next step draw from."""
        self._seed(index)
        return self.dropout_seed

    def as_summed(self, gradients: Sequence[torch.Tensor], loss: torch.Tensor) -> torch.Tensor:
        """Gradients of `state.parameters`, the loss and zeros, as the tree sums them."""
        return self.state.gathered([*gradients, self._behind(loss)])

    def apply_gradient(
        self,
        parts: Sequence[torch.Tensor],
        count: int,
        learning_rate: float,
        hyper: Hyper | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The update of a step of `count` micro-batches, whose gradients a TreeSum has summed to `parts`;
        gives loss and norm before clipping. Where one of them is not finite nothing changes. hyper: of this
        update alone."""
        self._one_process()
        self._order = self._order_of(count)
        loss, gradient = self._summed(parts)
        gradient[:1].masked_fill_(~loss.isfinite(), torch.nan)
        before, self._hyper = self._hyper, hyper or self._hyper
        try:
            norm = self._update(gradient, self._number(learning_rate))
        finally:
            self._hyper = before
        self.state.copy_to_16_bit()
        return loss, norm

    def _one_process(self) -> None:
        if self.world.size > 1:
            raise ValueError(f"the step is one of {self.world.size} ranks, wanted one of one process")

    # Those of TrainStep.

    def micro_batch_gradient(self, index: int, batch: Tensors, targets: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _seed(self, micro_batch: int) -> None:
        raise NotImplementedError

    def _behind(self, loss: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _check_identity(self) -> None:
        raise NotImplementedError

    def _tensors(self, tensors: Tensors) -> Tensors:
        raise NotImplementedError

    def _order_of(self, micro_batches: int) -> Order:
        raise NotImplementedError

    def _summed(self, roots: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def _update(self, gradient: torch.Tensor, learning_rate: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _number(self, value: float) -> torch.Tensor:
        raise NotImplementedError
