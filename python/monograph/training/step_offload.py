"""Offload of a training step: what its forward keeps for its backward leaves memory in between."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.fx import GraphModule

from monograph.memory.offload.activations import (
    SMALLEST_BYTES,
    checked_min_bytes,
    offload_activations,
    place_for,
)
from monograph.memory.offload.graph import OffloadingPartitioner, offloading
from monograph.memory.offload.places import Disk
from monograph.memory.offload.spill import Counts
from monograph.training.regions.outer_graph import outer_graph, partition

_BY_HOOKS = ("eager", "per_layer")
MODES = ("graph", "inductor", *_BY_HOOKS)


class StepOffload:
    """In a graph by its nodes; where layers run by themselves by the hooks of autograd.

    to: "disk", or "host" for a model on another device. folder: of the spill file, that for temporary files
    if missing. min_bytes: smaller tensors stay.
    """

    def __init__(
        self,
        model: nn.Module,
        mode: str,
        to: str,
        folder: str | os.PathLike[str] | None = None,
        min_bytes: int = SMALLEST_BYTES,
    ) -> None:
        if mode not in MODES:
            raise ValueError(
                f"offload is {to!r} and mode {mode!r}, wanted one of {', '.join(MODES)}: a whole step has no "
                "border between forward and backward"
            )
        devices = {parameter.device.type for parameter in model.parameters()} - {"cpu", "meta"}
        if to == "disk" and devices and mode not in _BY_HOOKS:
            raise ValueError(
                f"offload is 'disk', mode {mode!r} and the model on {', '.join(sorted(devices))}, wanted "
                "offload 'host': the operators move tensors of a device to host memory"
            )
        self.min_bytes = checked_min_bytes(min_bytes)
        self._place = place_for(model, to, folder, None)
        self._hooks = None
        if mode in _BY_HOOKS:
            self._hooks = offload_activations(
                model, to, folder=folder, min_bytes=min_bytes, place=self._place
            )

    def compile_options(self, mode: str) -> dict[str, Any]:
        """What torch.compile is told beside its usual arguments."""
        if mode == "graph":
            cut = offloading(partition, self.min_bytes)

            def offloading_outer_graph(graph: GraphModule, inputs: Any) -> Any:
                return outer_graph(graph, inputs, cut)

            return {"backend": offloading_outer_graph}
        if mode == "inductor":
            return {"options": {"custom_partitioner_fn": OffloadingPartitioner(self.min_bytes)}}
        return {}

    def around_forward(self) -> AbstractContextManager[Any]:
        return self._hooks if self._hooks is not None else nullcontext()

    def counts(self) -> Counts:
        """Transfers and bytes since the step was made; on a disk."""
        if not isinstance(self._place, Disk):
            raise NotImplementedError("offload: copies of a device in a graph are not counted")
        return self._place.counts()
