"""Models that torch's `fully_shard` has sharded: what calls parts past its hooks refuses them by name."""

from __future__ import annotations

from torch import nn

from monograph.ops.whole_tensors import described_part, is_part


def refuse_fully_sharded(model: nn.Module, what: str) -> None:
    """Raises if a parameter is a DTensor: hooks of `fully_shard` gather it when its module is called, outside
    of every graph, and a step that is one graph calls other modules than they hang on."""
    for name, parameter in model.named_parameters():
        if is_part(parameter):
            raise ValueError(
                f"{what}: {name} is {described_part(parameter)}, made by fully_shard, wanted a whole tensor. "
                "Shard with monograph.shard(model, mesh), whose gathers are part of the graph, or train the "
                "model in a loop that calls it: docs/reference/training.md, Other trainers on several ranks"
            )
