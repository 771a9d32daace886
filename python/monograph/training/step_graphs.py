"""StepGraphs: the model of a step with its parameters, regions and graphs, made anew when they change.

What is computed by them, and in which order over micro-batches and ranks, is step.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from monograph.distributed import World, check_same_values, padded
from monograph.distributed.expert_group import ExpertGroup
from monograph.distributed.same_models import check_same_adapters
from monograph.memory.base_memory import base_memory_of
from monograph.ops.seeded_dropout import seed_dropouts
from monograph.training.batch_keys import Tensors
from monograph.training.flat_parameters import FlatParameters
from monograph.training.identity import Identity
from monograph.training.loss import forward_loss
from monograph.training.loss_scale import LossScale, needs_scaling
from monograph.training.region_slices import RegionSlices
from monograph.training.regions import make_regions, refusals, region_layers
from monograph.training.regions.layer import give_back
from monograph.training.regions.layer_signature import state_of
from monograph.training.same_on_ranks import SameOnRanks
from monograph.training.step_warnings import tell_kinds, tell_plain
from monograph.training.token_slices import check_sliced, sliced_mlps
from monograph.training.unique_code import with_unique_code
from monograph.upstream.torch_names import dynamo_config, functorch_config

MODES = {
    "graph": "forward and backward as one graph with one operator per layer; no code is generated",
    "whole_step": "forward, backward, clipping and update as one such graph",
    "inductor": "forward and backward as one flat graph with Inductor's code",
    "inductor_whole_step": "forward, backward, clipping and update as one flat graph with Inductor's code",
    "per_layer": "one graph with Inductor's code for each decoder layer: it is not one graph",
    "eager": "no compilation",
}
WITH_REGIONS = ("graph", "whole_step")
WHOLE = ("whole_step", "inductor_whole_step")


OVER_SPREAD_EXPERTS = ("graph", "whole_step", "inductor", "eager")  # compared with one process


def _refuse_over_spread_experts(mode: str) -> None:
    """A compiler of another mode may leave out or move a call on one rank, for which the others then wait."""
    if mode not in OVER_SPREAD_EXPERTS:
        raise ValueError(
            f"mode is {mode!r} and experts are spread over ranks (expert_parallel), wanted one of "
            f"{', '.join(OVER_SPREAD_EXPERTS)}"
        )


class ModelLoss(nn.Module):
    """The model with its loss as one module, whose parameters `functional_call` can replace."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Tensors, targets: torch.Tensor) -> torch.Tensor:
        return forward_loss(self.model, batch, targets)


class StepGraphs:
    """Of one model and mode; `TrainStep` sets the attributes and calls `_attach` and `_prepare`."""

    model: nn.Module
    mode: str
    dynamic: bool
    world: World
    _module: ModelLoss
    _compile: dict[str, Any]  # options of torch.compile
    _sharded: bool
    _experts: ExpertGroup | None  # the ranks over which experts are spread
    _routers: Any
    _told_kinds: bool
    _loss_scaling: bool | None
    loss_scale: LossScale | None

    def _whole_step(
        self, flat: torch.Tensor, batch: Tensors, targets: torch.Tensor, learning_rate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and norm of a step of one micro-batch, with its update."""
        raise NotImplementedError

    def _attach(self, state: FlatParameters) -> None:
        """All that follows from the model's parameters and modules but for graphs."""
        if self._experts is not None:
            _refuse_over_spread_experts(self.mode)
        check_sliced(self.model, self.mode)
        self.state = state
        self.device = state.flat.device  # batches are moved there
        check_same_adapters(self.model, self.world)
        wanted = "the same values on every rank: one seed before the adapter is made"
        shared, own = state.shared(state.flat), state.own(state.flat)
        check_same_values("the trained parameters", shared, wanted, self.world)
        self._owners = state.owners
        if state.owners is not None:
            check_same_values("the factors of experts", own, wanted, state.owners.copies)
        self._shared_size, self._own_size = shared.numel(), own.numel()
        self._length = padded(shared.numel() + 1, self.world.size)  # gradient, loss, zeros
        if self.mode in WITH_REGIONS:
            make_regions(self.model, where_possible=True)
            tell_plain(self.mode, refusals(self.model).values())
        elif self.mode != "eager" and region_layers(self.model):
            raise ValueError(
                f"mode is {self.mode!r} on a model with regions, wanted 'graph' or 'whole_step', or "
                "monograph.training.regions.undo_regions(model) before"
            )
        self.dropout_seed = seed_dropouts(self.model)
        self._scale_loss()
        self._identity = Identity(
            self.model,
            mode=self.mode,
            compiled=self.mode != "eager",
            sliced=self.mode in WITH_REGIONS or self.mode in WHOLE,
            unscaled=self._loss_scaling is None and self.loss_scale is None,
        )
        self._same = SameOnRanks(self.model)
        self._base = base_memory_of(self.model)

    def _scale_loss(self) -> None:
        scaled = needs_scaling(self.model) if self._loss_scaling is None else self._loss_scaling
        if scaled and self.loss_scale is None:
            self.loss_scale = LossScale(device=self.device)

    def _check_identity(self) -> None:
        self._identity.check()
        if self._base is not None:
            self._base.check()
        if self.state.take_changed():
            self._slices = RegionSlices(self.model, self.state)

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
            self._forward = torch.compile(with_unique_code(self._loss), **self._compile)
            self._evaluate = torch.compile(with_unique_code(self._eval_loss), **self._compile)
            self._whole = torch.compile(with_unique_code(self._whole_step), **self._compile)

    def _tell_kinds(self) -> None:
        """Once, before layers are traced, if that takes long."""
        if self.mode in WITH_REGIONS and not self._told_kinds:
            tell_kinds(self.mode, len({state_of(layer).key for layer in region_layers(self.model).values()}))
        self._told_kinds = True

    def _plain_layers(self, paths: Sequence[str], reason: str) -> None:
        layers = region_layers(self.model)
        for path in paths:
            give_back(layers[path])
        kinds = sorted({type(layers[path]).__name__ for path in paths})
        named = paths[0] if len(paths) == 1 else f"{paths[0]} ... {paths[-1]}"
        tell_plain(self.mode, [f"{named} ({', '.join(kinds)}) cannot be regions: {reason}"])

    def _run(self, work: Callable[[], Any]) -> Any:
        """`work()`, again without those regions that turn out to be none."""
        self._tell_kinds()
        while True:
            try:
                with self._without_graphs_of_others():
                    return work()
            except Exception:
                layers = region_layers(self.model)
                refused = [layer for layer in layers.values() if layer.region_refused is not None]
                if not refused or self.mode not in WITH_REGIONS or self._needs_regions():
                    raise
                kind, hooked = type(refused[0]), state_of(refused[0]).hooked is not None
                alike = {path: layer for path, layer in layers.items() if type(layer) is kind}
                paths = [p for p, layer in alike.items() if not hooked or state_of(layer).hooked is not None]
                self._plain_layers(paths, str(refused[0].region_refused))
                self._prepare()

    def _needs_regions(self) -> bool:
        """Whether plain layers would not do what was asked for."""
        return bool(sliced_mlps(self.model))

    def _without_graphs_of_others(self) -> Any:
        """On torch 2.13, with its cache of graphs on, `per_layer` went on with the code for the old
        `variance_epsilon` of a checkpointed layer after it had changed. Not seen with it off; where in torch
        the fault lies is not known. The cache of Inductor's code stays on."""
        if self.mode == "eager" or self.mode in WITH_REGIONS:
            return nullcontext()
        return functorch_config.patch(enable_autograd_cache=False)

    def _loss(self, batch: Tensors, targets: torch.Tensor) -> torch.Tensor:
        return self._module(batch, targets)

    # A function of its own: the tracer keeps graphs by code, and evaluation must not recompile training.
    def _eval_loss(self, batch: Tensors, targets: torch.Tensor) -> torch.Tensor:
        return self._module(batch, targets)

    def _tracing(self) -> Any:
        """A tapped layer forgets, still within its checkpoint, what its router has put aside there; a sharded
        one puts its gathered tensors away."""
        if self._routers is None and not self._sharded:
            return nullcontext()
        return dynamo_config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a transformers model: what checkpointing and regional compilation work on."""
    from monograph.upstream.transformers_names import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
