"""Whether accelerate shards, if that was asked of it: on a CPU it does not, and says nothing."""

from __future__ import annotations

import os

from accelerate import PartialState
from accelerate.utils import DistributedType

from monograph.upstream.accelerate_names import is_initialized

ASKED = "ACCELERATE_USE_FSDP"  # `accelerate launch` and an Accelerator with a plugin set it


def unheeded_sharding(asked: bool = False) -> str | None:
    """What to say if FSDP was asked for, by `asked` or of accelerate, and something else runs; else None."""
    asked = asked or os.environ.get(ASKED, "false").lower() == "true"
    if not asked or not is_initialized():
        return None
    state = PartialState()
    if state.distributed_type == DistributedType.FSDP:
        return None
    ranks = state.num_processes
    runs = "DDP runs" if ranks > 1 else "one process runs"
    held = f"each of {ranks} ranks" if ranks > 1 else "it"
    return (
        f"FSDP was asked for and {runs}: accelerate does not shard on {state.device.type}, and {held} holds "
        "the whole model. docs/reference/training.md, Other trainers on several ranks"
    )
