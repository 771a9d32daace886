"""What a training step says through the logger `monograph`."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch import nn

from monograph.distributed.shard import shard_group_of
from monograph.distributed.world import asked_size
from monograph.ops.linear_cross_entropy import IGNORED

_log = logging.getLogger("monograph")

# Of tracing: 2.6 (Gemma 4) and 3.8 s (3n) were measured. A first step that takes longer than 10 s says so.
SECONDS_A_KIND, MOST_SECONDS = 3, 10


def tell_alone(model: nn.Module) -> None:
    """Of a step without a world: other ranks are there, and nothing is summed over them."""
    cut, started = shard_group_of(model), asked_size()
    if cut is not None or started > 1:
        _log.warning(
            "monograph: %s and TrainStep has no world: each rank trains an adapter of its own; wanted "
            "TrainStep(model, world=monograph.distributed.join()), or world=alone() if that is meant",
            f"the model is sharded over {cut.size} ranks" if cut else f"WORLD_SIZE is {started}",
        )


def tell_plain(mode: str, reasons: Iterable[str]) -> None:
    for reason in reasons:
        _log.warning(
            "monograph: mode %s: %s; what is no region is computed by its own code in the same graph, "
            "without generated code; mode inductor generates code. Before the first step each such layer "
            "is traced for itself, which takes seconds a layer",
            mode,
            reason,
        )


def tell_kinds(mode: str, kinds: int) -> None:
    if kinds * SECONDS_A_KIND > MOST_SECONDS:
        _log.warning(
            "monograph: mode %s: %d kinds of layers are traced before the first step, about %d s",
            mode,
            kinds,
            kinds * SECONDS_A_KIND,
        )


def tell_no_target() -> None:
    _log.warning(
        "monograph: a step without any target (every label is %d): nothing changes and no step is counted; "
        "it is said once",
        IGNORED,
    )
