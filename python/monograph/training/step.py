"""TrainStep: forward, loss, backward, clipping and AdamW, compiled in the way its mode says."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from monograph.distributed.shard import sharded_units
from monograph.integrations.torch.private_names import dynamo_config, mark_dynamic
from monograph.ops.linear_cross_entropy import IGNORED
from monograph.ops.seeded_dropout import seed_dropouts
from monograph.packing.layers_with_state import guard_packed
from monograph.regions import make_regions, outer_graph, refusals, region_layers
from monograph.regions.kind import state_of
from monograph.regions.layer import give_back
from monograph.training.flat_parameters import FlatParameters
from monograph.training.loss import add_router_loss, count_targets, forward_loss
from monograph.training.loss_scale import LossScale, needs_scaling
from monograph.training.own_code import with_own_code
from monograph.training.region_slices import RegionSlices

_log = logging.getLogger("monograph")

MODES = {
    "graph": "forward and backward as one graph with one operator per layer; no code is generated",
    "whole_step": "forward, backward, clipping and update as one such graph",
    "inductor": "forward and backward as one flat graph with Inductor's code",
    "inductor_whole_step": "forward, backward, clipping and update as one flat graph with Inductor's code",
    "per_layer": "one graph with Inductor's code for each decoder layer: it is not one graph",
    "eager": "no compilation",
    "regions": "another name of `graph`",
}
WITH_REGIONS = ("graph", "whole_step")
_WHOLE = ("whole_step", "inductor_whole_step")

# What the models read. The collators' other entries repeat it for flash attention, as numbers that change.
_TENSORS = ("input_ids", "labels", "position_ids", "attention_mask", "cu_seqlens")


@dataclass(frozen=True)
class StepResult:
    """loss: mean over the targets of all micro-batches; grad_norm: before clipping; both float32 [].

    loss_scale: that of the next step, float32 []; None without loss scaling. A step whose norm is not finite
    has changed nothing else.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    targets: int
    loss_scale: torch.Tensor | None = None


class _Loss(nn.Module):
    """The model with its loss as one module, whose parameters `functional_call` can replace."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        return forward_loss(self.model, batch, targets)


class TrainStep:
    """One optimiser step over the micro-batches that the collators make.

        step = TrainStep(model, mode="graph")
        result = step(micro_batches, learning_rate=2e-4)
        loss_sum, targets = step.evaluate(batch)

    The loss is the sum over all targets of the step divided by their number, whatever the micro-batches are.
    A loss or gradient that is not finite changes nothing. The masks of dropout layers follow from `seed`,
    the number of the step and that of the micro-batch alone, so that a resumed run draws what the first drew.

    mode: a key of MODES.
    dynamic: whether lengths change from batch to batch. If all batches have one shape, False is faster.
    backend: of torch.compile; None: "inductor", and for "graph" and "whole_step" one that runs the graph as
        it is. Those two make regions of the model's layers (monograph.regions), and say which cannot be one.
    loss_scaling: whether the loss is scaled as torch.amp.GradScaler does; None: if the model has parameters
        in float16.
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
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}, wanted one of {', '.join(MODES)}")
        mode = "graph" if mode == "regions" else mode
        self.model, self.mode, self.dynamic, self.seed = model, mode, dynamic, seed
        guard_packed(model)
        self._routers = add_router_loss(model)
        self._sharded = bool(sharded_units(model))
        self._module = _Loss(model)
        self.state = FlatParameters(model)
        if mode in WITH_REGIONS:
            make_regions(model, where_possible=True)
            self._tell_plain(refusals(model).values())
        elif mode != "eager" and region_layers(model):
            raise ValueError(
                f"mode is {mode!r} on a model with regions, wanted 'graph' or 'whole_step', or "
                "monograph.regions.undo_regions(model) before"
            )
        scaled = needs_scaling(model) if loss_scaling is None else loss_scaling
        self.loss_scale = LossScale() if scaled else None
        self._dropout_seed = seed_dropouts(model)
        self._rows = 0
        self._hyper = (betas, eps, weight_decay, max_grad_norm)
        backend = backend or (outer_graph if mode in WITH_REGIONS else "inductor")
        self._compile: dict[str, Any] = {"backend": backend, "fullgraph": True}
        self._prepare()

    def _prepare(self) -> None:
        """Slices and graphs for the model as it is now."""
        self._slices = RegionSlices(self.model, self.state)
        if self.mode == "whole_step" and self._slices.shared:
            self._plain_layers(self._slices.shared, "they share a trained parameter with others")
            self._slices = RegionSlices(self.model, self.state)
        self._forward: Callable[..., torch.Tensor] = self._loss
        self._evaluate: Callable[..., torch.Tensor] = self._eval_loss
        self._whole: Callable[..., tuple[torch.Tensor, torch.Tensor]] = self._whole_step
        if self.mode == "per_layer":
            for layer in decoder_layers(self.model):
                layer.compile(**self._compile, dynamic=self.dynamic)
        elif self.mode != "eager":
            # Lengths are marked dynamic one by one: dynamic=True would make a symbol of every number.
            self._forward = torch.compile(with_own_code(self._loss), **self._compile)
            self._evaluate = torch.compile(with_own_code(self._eval_loss), **self._compile)
            self._whole = torch.compile(with_own_code(self._whole_step), **self._compile)

    def _tell_plain(self, reasons: Iterable[str]) -> None:
        for reason in reasons:
            _log.warning(
                "monograph: mode %s: %s; what is no region is computed by its own code in the same graph, "
                "without generated code; mode inductor generates code",
                self.mode,
                reason,
            )

    def _plain_layers(self, paths: Sequence[str], reason: str) -> None:
        layers = region_layers(self.model)
        for path in paths:
            give_back(layers[path])
        kinds = sorted({type(layers[path]).__name__ for path in paths})
        named = paths[0] if len(paths) == 1 else f"{paths[0]} ... {paths[-1]}"
        self._tell_plain([f"{named} ({', '.join(kinds)}) cannot be regions: {reason}"])

    def _run(self, work: Callable[[], Any]) -> Any:
        """`work()`, again without those regions that turn out to be none."""
        while True:
            try:
                return work()
            except Exception:
                layers = region_layers(self.model)
                refused = [layer for layer in layers.values() if layer.region_refused is not None]
                if not refused or self.mode not in WITH_REGIONS:
                    raise
                kind, hooked = type(refused[0]), state_of(refused[0]).hooked is not None
                alike = {path: layer for path, layer in layers.items() if type(layer) is kind}
                paths = [p for p, layer in alike.items() if not hooked or state_of(layer).hooked is not None]
                self._plain_layers(paths, str(refused[0].region_refused))
                self._prepare()

    def _loss(self, batch: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        return self._module(batch, targets)

    # A function of its own: the tracer keeps graphs by code, and evaluation must not recompile training.
    def _eval_loss(self, batch: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        return self._module(batch, targets)

    def _whole_step(
        self,
        flat: torch.Tensor,
        batch: dict[str, torch.Tensor],
        targets: torch.Tensor,
        learning_rate: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pieces = flat.split(self._slices.sizes)
        free = {name: pieces[place] for name, place in self._slices.free}
        self._slices.give(pieces)
        replacements = self.state.replacements(free, "model.")
        loss = functional_call(self._module, replacements, (batch, targets), tie_weights=False)
        self._slices.give(None)
        scaled = loss if self.loss_scale is None else loss * self.loss_scale.scale
        (gradient,) = torch.autograd.grad(scaled, [flat])
        gradient = torch.where(loss.isfinite(), gradient, torch.nan)
        return loss.detach(), self._update(gradient, learning_rate)

    def _update(self, gradient: torch.Tensor, learning_rate: torch.Tensor) -> torch.Tensor:
        """Clipping, AdamW and the next loss scale; gives the norm of the gradient before clipping."""
        if self.loss_scale is not None:
            gradient = self.loss_scale.unscaled(gradient)
        norm = self.state.update(gradient, learning_rate, *self._hyper)
        if self.loss_scale is not None:
            self.loss_scale.update(norm.isfinite())
        return norm

    def __call__(self, micro_batches: Sequence[Mapping[str, Any]], learning_rate: float) -> StepResult:
        if not micro_batches:
            raise ValueError("no micro-batches: a step wants 1 or more")
        batches = [self._tensors(batch) for batch in micro_batches]
        counts = [count_targets(batch) for batch in batches]
        # float32, so that a count of 1 is no special case for a graph.
        targets = torch.tensor(float(max(sum(counts), 1)))
        rate = torch.tensor(learning_rate, dtype=torch.float32)
        self._share_router_loss(1 / len(batches))
        self.model.train()
        if self.mode in _WHOLE and len(batches) == 1:
            self._seed(0)
            loss, norm = self._run(partial(self._one_whole, batches[0], targets, rate))
        else:
            loss, gradient = torch.zeros(()), torch.zeros(0)
            scale = None if self.loss_scale is None else [self.loss_scale.scale]
            for index, batch in enumerate(batches):
                self._seed(index)
                part = self._run(partial(self._one_forward, batch, targets))
                own = torch.autograd.grad(part, self._slices.leaves, scale, materialize_grads=True)
                gathered = self.state.gathered(own)
                gradient = gathered if index == 0 else gradient.add_(gathered)
                loss = loss + part.detach()
            # A loss that is no number may have a gradient that is one; such a step is skipped too.
            gradient[:1].masked_fill_(~loss.isfinite(), torch.nan)
            norm = self._update(gradient, rate)
        self.state.copy_to_16_bit()
        loss_scale = None if self.loss_scale is None else self.loss_scale.scale.clone()
        return StepResult(loss, norm, sum(counts), loss_scale)

    def evaluate(self, batch: Mapping[str, Any]) -> tuple[torch.Tensor, int]:
        """The summed loss over the targets of a batch, and their number."""
        tensors = self._tensors(batch)
        count = count_targets(tensors)
        self.model.eval()
        self._share_router_loss(0.0)
        return self._run(partial(self._one_evaluation, tensors)), count

    def _one_evaluation(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad(), self._slices.in_use():
            return self._evaluate(batch, torch.ones(()))

    def _one_forward(self, batch: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        with self._slices.in_use(), self._tracing():
            return self._forward(batch, targets)

    def _one_whole(
        self, batch: dict[str, torch.Tensor], targets: torch.Tensor, learning_rate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        flat = self.state.flat.requires_grad_(True)
        try:
            with self._slices.in_use(), self._tracing(), dynamo_config.patch(trace_autograd_ops=True):
                return self._whole(flat, batch, targets, learning_rate)
        finally:
            flat.requires_grad_(False)

    def _tensors(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        tensors = {name: batch[name] for name in _TENSORS if batch.get(name) is not None}
        rows = tensors["input_ids"].shape[0]
        self._rows = self._rows or rows
        if rows == 1 < self._rows and "cu_seqlens" not in tensors:  # packed batches always have one
            # One row is a constant to the tracer: an epoch's last batch gets a second, without targets.
            tensors = {name: tensor.repeat(2, 1) for name, tensor in tensors.items()}
            tensors["labels"][1] = IGNORED
        if self.dynamic and self.mode != "eager":
            for tensor in tensors.values():
                mark_lengths(tensor, mark_dynamic)
        return tensors

    def _tracing(self) -> Any:
        """A tapped layer forgets, still within its checkpoint, what its router has put aside there; a sharded
        one puts its gathered tensors away."""
        if self._routers is None and not self._sharded:
            return nullcontext()
        return dynamo_config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True)

    def _share_router_loss(self, share: float) -> None:
        """The loss of the routers is the mean over micro-batches, and none in evaluation."""
        if self._routers is not None:
            self._routers.share.fill_(share)

    def _seed(self, micro_batch: int) -> None:
        mixed = (self.seed * 0x9E3779B1 + int(self.state.steps)) * 4096 + micro_batch
        self._dropout_seed.fill_(mixed % 2**63)

    def state_dict(self) -> dict[str, torch.Tensor]:
        scale = {} if self.loss_scale is None else self.loss_scale.state_dict()
        return self.state.state_dict() | scale

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        own = {} if self.loss_scale is None else self.loss_scale.state_dict()
        if missing := sorted(own.keys() - state.keys()):
            raise ValueError(f"optimizer state: missing {missing}, which a run with a scaled loss has")
        self.state.load_state_dict({name: value for name, value in state.items() if name not in own})
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(state)


def mark_lengths(tensor: torch.Tensor, mark: Callable[[torch.Tensor, int], None]) -> None:
    """Tells the tracer, with `mark`, which sizes change from batch to batch: all that are no constants to it.

    Sizes 0 and 1 are constants: a packed batch has one row, always.
    """
    for dim, size in enumerate(tensor.shape):
        if size > 1:
            mark(tensor, dim)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a transformers model: what checkpointing and regional compilation work on."""
    from monograph.integrations.transformers.private_names import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
