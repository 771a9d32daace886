"""TrainStep: forward, loss, backward, clipping and AdamW, compiled in the way its mode says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from monograph.distributed import (
    Order,
    TreeSum,
    World,
    alone,
    sum_over_ranks,
)
from monograph.distributed.expert_parallel import expert_group_of
from monograph.distributed.expert_sums import OwnerOrder, OwnerSum
from monograph.distributed.fully_sharded import refuse_fully_sharded
from monograph.distributed.replica_check import bits_of
from monograph.distributed.shard import sharded_units
from monograph.memory.offload.activations import SMALLEST_BYTES
from monograph.packing.stateful_layers import guard_packed
from monograph.training.batch_keys import KNOWN, BatchKeys, Tensors
from monograph.training.flat_parameters import FlatParameters
from monograph.training.loss import add_router_loss, count_targets
from monograph.training.micro_batches import mark_lengths, take, with_second_row
from monograph.training.regions import outer_graph
from monograph.training.step_graphs import MODES, WHOLE, WITH_REGIONS, ModelLoss, StepGraphs
from monograph.training.step_offload import StepOffload
from monograph.training.step_parts import StepParts
from monograph.training.step_state import StepState
from monograph.training.step_warnings import tell_alone, tell_no_target
from monograph.training.traced_exchanges import traced_exchanges
from monograph.upstream.torch_names import dynamo_config, mark_dynamic, maybe_mark_dynamic
from monograph.upstream.untested import mode_on_this_torch

MOST_MICRO_BATCHES = 4096  # of a step: beyond them seeds of dropout would be those of the next step


@dataclass(frozen=True)
class StepResult:
    """loss: mean over the targets of all micro-batches; grad_norm: before clipping; both float32 [].

    loss_scale: that of the next step, float32 []; None without loss scaling. A step whose norm is not finite
    has changed nothing else; nor has one without targets, whose loss and norm are 0. All ranks have the same
    bits.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    targets: int
    loss_scale: torch.Tensor | None = None


class TrainStep(StepGraphs, StepState, StepParts):
    """One optimiser step over the micro-batches that the collators make.

        step = TrainStep(model, mode="graph")
        result = step(micro_batches, learning_rate=2e-4)
        loss_sum, targets = step.evaluate(batch)

    The loss is the sum over all targets of the step divided by their number, whatever the micro-batches are.
    A loss or gradient that is not finite changes nothing. The masks of dropout layers follow from `seed`,
    the number of the step and that of the micro-batch alone, so that a resumed run draws what the first drew.
    Gradients and losses of micro-batches are summed in a tree (monograph.distributed.tree) whose shape does
    not depend on the number of ranks: parameters and results have the same bits on any number of them.

    mode: a key of MODES. On a torch that was never tested it becomes "eager", with a warning.
    dynamic: whether lengths change from batch to batch. If all batches have one shape, False is faster.
    backend: of torch.compile; None: "inductor", and for "graph" and "whole_step" one that runs the graph as
        it is. Those two make regions of the model's layers, and say which cannot be one.
    loss_scaling: whether the loss is scaled as torch.amp.GradScaler does; None: if the model has parameters
        in float16.
    world: the processes that make the step together, each with a model of the same values; None: this one.
        A step, its evaluation and its making are collectives. Every rank is given the same sequence of all
        micro-batches, and reads its own and the first.
    virtual_shards: leaves of the tree; None: as many as the step has micro-batches. Another number is another
        order of summing, and so other bits.
    offload: "disk" or "host": what a forward keeps for its backward leaves memory in between, into a file in
        `offload_folder` or from a device to the host. In the modes of StepOffload; the bits stay the same.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        mode: str = "graph",
        dynamic: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        seed: int = 0,
        backend: str | Callable[..., Any] | None = None,
        loss_scaling: bool | None = None,
        world: World | None = None,
        virtual_shards: int | None = None,
        offload: str | None = None,
        offload_folder: str | None = None,
        offload_min_bytes: int = SMALLEST_BYTES,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}, wanted one of {', '.join(MODES)}")
        if virtual_shards is not None and (type(virtual_shards) is not int or virtual_shards < 1):
            raise ValueError(f"virtual_shards is {virtual_shards!r}, wanted a whole number, 1 or more")
        mode = mode_on_this_torch(mode)
        refuse_fully_sharded(model, "TrainStep")
        self.model, self.mode, self.dynamic, self.seed = model, mode, dynamic, seed
        guard_packed(model)
        self._routers = add_router_loss(model)
        self._experts = expert_group_of(model)
        self._sharded = bool(sharded_units(model)) or self._experts is not None
        if world is None:
            tell_alone(model)
        self._module = ModelLoss(model)
        self._keys = BatchKeys(model)
        self.world, self.virtual_shards = world or alone(), virtual_shards
        self.loss_scale, self._loss_scaling = None, loss_scaling
        self._attach(FlatParameters(model))
        if self._routers is not None:
            self._routers.share = self._routers.share.to(self.device)
        self._order = self._order_of(1)
        self._rows, self._told_kinds, self._told_no_target = 0, False, False
        self._hyper = (betas, eps, weight_decay, max_grad_norm)
        backend = backend or (outer_graph if mode in WITH_REGIONS else "inductor")
        self._compile: dict[str, Any] = {"backend": backend, "fullgraph": True}
        self.offload = None
        if offload is not None:
            if backend not in (outer_graph, "inductor"):
                raise ValueError(
                    f"offload is {offload!r} and backend {backend!r}, wanted no backend beside it"
                )
            self.offload = StepOffload(model, mode, offload, offload_folder, offload_min_bytes)
            self._compile |= self.offload.compile_options(mode)
        self._prepare()

    def rebuild(self) -> None:
        """Makes the step anew for the model as it is now: other trained parameters, modules, hooks.

        Parameters that have the name and shape of one before keep its moments, and so do the count of steps
        and the loss scale, which begins if the model is float16 now; new ones begin with moments and a count
        of zero. Graphs are made anew. With several ranks it is a collective.
        """
        self._attach(FlatParameters(self.model, before=self.state))
        self._prepare()

    def _order_of(self, micro_batches: int) -> Order:
        leaves = self.virtual_shards or micro_batches
        return Order.of(micro_batches, leaves, self.world.rank, self.world.size)

    def _whole_step(
        self,
        flat: torch.Tensor,
        batch: Tensors,
        targets: torch.Tensor,
        learning_rate: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pieces = self._slices.pieces(flat)
        spread = [piece for piece, cut in zip(pieces, self._slices.cut, strict=True) if cut]
        free = {name: pieces[place] for name, place in self._slices.free}
        self._slices.give(pieces)
        replacements = self.state.replacements(free, "model.")
        loss = functional_call(self._module, replacements, (batch, targets), tie_weights=False)
        self._slices.give(None)
        scaled = loss if self.loss_scale is None else loss * self.loss_scale.scale
        gradient, *rows = torch.autograd.grad(scaled, [flat, *spread])
        loss = loss.detach()
        if self.world.size > 1:
            gradient = self.state.shared(gradient)
            loss, gradient = self._summed([torch.cat([gradient, self._behind(loss)])])
        if self._owners is not None:
            own = OwnerSum(self._owner_order, self._owners, len(rows))
            own.add(rows)
            gradient = self.state.put_together(gradient, own.total(self._own_size))
        gradient = torch.where(loss.isfinite(), gradient, torch.nan)
        return loss, self._update(gradient, learning_rate)

    def _behind(self, loss: torch.Tensor) -> torch.Tensor:
        """What follows the gradient in the tensors that are summed."""
        return nn.functional.pad(loss.float().reshape(1), (0, self._length - self._shared_size - 1))

    def _summed(self, roots: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and gradient of the step from this rank's subtrees."""
        total = sum_over_ranks(roots, self._length, self._order, self.world, self.device)
        return total[self._shared_size].clone(), total[: self._shared_size]

    def _update(self, gradient: torch.Tensor, learning_rate: torch.Tensor) -> torch.Tensor:
        """Clipping, AdamW and the next loss scale; gives the norm of the gradient before clipping."""
        if self.loss_scale is not None:
            gradient = self.loss_scale.unscaled(gradient)
        norm = self.state.update(gradient, learning_rate, *self._hyper)
        if self.loss_scale is not None:
            self.loss_scale.update(norm.isfinite())
        return norm

    def __call__(self, micro_batches: Sequence[Mapping[str, Any]], learning_rate: float) -> StepResult:
        if not 1 <= len(micro_batches) <= MOST_MICRO_BATCHES:
            raise ValueError(
                f"a step of {len(micro_batches)} micro-batches, wanted 1 to {MOST_MICRO_BATCHES}"
            )
        self._check_identity()
        self._order = order = self._order_of(len(micro_batches))
        if self._owners is not None:
            leaves = self.virtual_shards or len(micro_batches)
            self._owner_order = OwnerOrder.of(len(micro_batches), leaves, self._owners)
        alike = self._alike(learning_rate)
        taken = take(micro_batches, order.own, self.world, self._keys, alike, first_too=self._sharded)
        if taken.targets == 0:
            return self._nothing_to_learn()
        self._rows = self._rows or taken.first_rows
        batches = {index: self._tensors(batch) for index, batch in taken.batches.items()}
        # float32, so that a count of 1 is no special case for a graph.
        targets = self._number(taken.targets)
        rate = self._number(learning_rate)
        self._share_router_loss(1 / len(micro_batches))
        self.model.train()
        if self.mode in WHOLE and order.one_each:
            (index,) = order.own
            self._seed(index)
            self.world.doing("micro-batch", str(index))
            loss, norm = map(self._kept, self._run(partial(self._one_whole, batches[index], targets, rate)))
        else:
            loss, gradient = self._accumulated(batches, targets)
            # A loss that is not finite may have a gradient that is; such a step is skipped too.
            gradient[:1].masked_fill_(~loss.isfinite(), torch.nan)
            norm = self._update(gradient, rate)
        self.state.copy_to_16_bit()
        return StepResult(loss, norm, taken.targets, self._scale_of_next())

    def _scale_of_next(self) -> torch.Tensor | None:
        return None if self.loss_scale is None else self.loss_scale.scale.clone()

    def _nothing_to_learn(self) -> StepResult:
        """An update would move all parameters by their momentum."""
        if not self._told_no_target:
            self._told_no_target = True
            tell_no_target()
        return StepResult(self._number(0), self._number(0), 0, self._scale_of_next())

    def _kept(self, result: torch.Tensor) -> torch.Tensor:
        """A result to be read later: a CUDA graph writes the next one to the same place."""
        return result if self.device.type == "cpu" else result.clone()

    def _number(self, value: float) -> torch.Tensor:
        """float32 [] on the device: filled there, so that nothing waits for a copy."""
        return torch.full((), value, dtype=torch.float32, device=self.device)

    def _alike(self, learning_rate: float) -> dict[str, int]:
        """What ranks must have alike for a step: its sums are the same on all ranks, whatever they add."""
        if self.world.size == 1:
            return {}
        return {
            "step": int(self.state.steps),
            "seed": self.seed % 2**63,
            "virtual_shards": self.virtual_shards or 0,
            "learning_rate (bits)": bits_of(learning_rate),
            "sum of the trained parameters (bits)": self.fingerprint(),
            **self._same.numbers(self._identity.named_modules),
            **self._exchanges(),
        }

    def _exchanges(self) -> dict[str, int]:
        """What spread experts have sent so far, and will by the traces of their layers."""
        if self._experts is None:
            return {}
        return {
            "calls of spread experts (hash)": self._experts.made,
            "calls of spread experts in the traces of layers (hash)": traced_exchanges(self.model),
        }

    def _accumulated(
        self, batches: Mapping[int, Tensors], targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and gradient of the step, micro-batch by micro-batch."""
        total = TreeSum(self._order.sums)
        cut = self._slices.cut
        own = None if self._owners is None else OwnerSum(self._owner_order, self._owners, sum(cut))
        for index in (*self._order.own, *[None] * self._forwards_missing(self._order)):
            if index is not None:
                self.world.doing("micro-batch", str(index))
            pieces, loss = self._gradients(index or 0, batches[index or 0], targets)
            if own is not None:
                own.add([piece for piece, one in zip(pieces, cut, strict=True) if one])
            if index is not None:
                total.add(self._flat(pieces, loss))
            del pieces
        self.world.doing("sum")
        loss, gradient = self._summed(total.parts)
        if own is not None:
            gradient = self.state.put_together(gradient, own.total(self._own_size))
        return loss, gradient

    def _forwards_missing(self, order: Order) -> int:
        """How often a rank with fewer batches than others computes one for nothing: forward and backward of a
        sharded model are collectives."""
        return order.most - len(order.own) if self._sharded else 0

    def micro_batch_gradient(self, index: int, batch: Tensors, targets: torch.Tensor) -> torch.Tensor:
        """Gradient, loss and zeros, as they are summed."""
        return self._flat(*self._gradients(index, batch, targets))

    def _gradients(
        self, index: int, batch: Tensors, targets: torch.Tensor
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """By leaf, and the loss."""
        self._seed(index)
        loss = self._run(partial(self.micro_batch_loss, batch, targets))
        scale = None if self.loss_scale is None else [self.loss_scale.scale]
        return torch.autograd.grad(loss, self._slices.leaves, scale, materialize_grads=True), loss.detach()

    def _flat(self, pieces: Sequence[torch.Tensor], loss: torch.Tensor) -> torch.Tensor:
        shared = [piece for piece, cut in zip(pieces, self._slices.cut, strict=True) if not cut]
        return self.state.gathered([*shared, self._behind(loss)])

    def evaluate(self, batch: Mapping[str, Any]) -> tuple[torch.Tensor, int]:
        """The summed loss over the targets of a batch, and their number."""
        if self.mode != "eager":  # which reads the parameters themselves
            self._check_identity()
        tensors = self._keys(batch)
        count = count_targets(tensors)
        self._rows = self._rows or tensors["input_ids"].shape[0]
        tensors = self._tensors(tensors)
        self.model.eval()
        self._share_router_loss(0.0)
        return self._kept(self._run(partial(self._one_evaluation, tensors))), count

    def evaluate_all(self, batches: Sequence[Mapping[str, Any]]) -> tuple[float, int]:
        """`evaluate` of all batches, over all ranks: the losses are summed in the order of the batches.

        Every rank is given the same sequence, and reads its own part of it.
        """
        if not batches:
            return 0.0, 0
        order = Order.of(len(batches), len(batches), self.world.rank, self.world.size)
        if self.world.size > 1:
            self._rows = self._rows or self._keys(batches[0])["input_ids"].shape[0]
        own = [(float(loss), count) for loss, count in (self.evaluate(batches[i]) for i in order.own)]
        for _ in range(self._forwards_missing(order)):
            self.evaluate(batches[0])
        self.world.doing("evaluated")
        found = [pair for part in self.world.gathered(own) for pair in part]
        if len(found) != len(batches):
            raise ValueError(
                f"rank {self.world.rank} has {len(batches)} batches to evaluate, but all ranks together "
                f"evaluated {len(found)}; wanted the same sequence on every rank"
            )
        total = 0.0
        for loss, _ in found:  # sum() would round in another way
            total += loss
        return total, sum(count for _, count in found)

    def _one_evaluation(self, batch: Tensors) -> torch.Tensor:
        with torch.no_grad(), self._slices.in_use():
            return self._evaluate(batch, self._number(1))

    def micro_batch_loss(self, batch: Tensors, targets: torch.Tensor) -> torch.Tensor:
        """The forward of a micro-batch; its graph of gradients is not run yet."""
        around = nullcontext() if self.offload is None else self.offload.around_forward()
        with self._slices.in_use(), self._tracing(), around:
            return self._forward(batch, targets)

    def _one_whole(
        self, batch: Tensors, targets: torch.Tensor, learning_rate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        flat = self.state.flat.requires_grad_(True)
        try:
            with self._slices.in_use(), self._tracing(), dynamo_config.patch(trace_autograd_ops=True):
                return self._whole(flat, batch, targets, learning_rate)
        finally:
            flat.requires_grad_(False)

    def _tensors(self, tensors: Tensors) -> Tensors:
        tensors = {name: tensor.to(self.device, non_blocking=True) for name, tensor in tensors.items()}
        tensors = with_second_row(tensors, self._rows)
        if self.dynamic and self.mode != "eager":
            for name, tensor in tensors.items():  # any size of an image may be a constant to the model
                mark_lengths(tensor, mark_dynamic if name in KNOWN else maybe_mark_dynamic)
        return tensors

    def _share_router_loss(self, share: float) -> None:
        """The loss of the routers is the mean over micro-batches, and none in evaluation."""
        if self._routers is not None:
            self._routers.share.fill_(share)

    def _seed(self, micro_batch: int) -> None:
        """(seed * 0x9E3779B1 + steps) * MOST_MICRO_BATCHES + micro_batch, modulo 2^63, where the steps are
        counted: reading their number would make the host wait for the step before."""
        constant = (self.seed * 0x9E3779B1 * MOST_MICRO_BATCHES + micro_batch) % 2**63
        mixed = self.state.steps.to(torch.int64) * MOST_MICRO_BATCHES + constant
        self.dropout_seed.copy_(mixed & (2**63 - 1))
