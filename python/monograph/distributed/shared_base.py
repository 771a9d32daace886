"""share_base: a frozen base that every rank has mapped from the same files stays mapped under DDP.

DistributedDataParallel broadcasts all parameters of rank 0 when it is made, frozen ones too, and so writes to
each page of a mapped base: what the ranks of a host shared in the page cache is then a copy in each of them.
Frozen tensors that are equal on all ranks need no broadcast.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from monograph.distributed.world import World
from monograph.upstream.torch_names import leave_out_of_ddp


def _digest(tensor: torch.Tensor) -> str:
    data: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()  # no copy
    return hashlib.sha256(data).hexdigest()


def share_base(model: nn.Module, world: World) -> int:
    """Tells DDP to leave the frozen parameters of `model` as they are; gives their bytes.

        trainer = SFTTrainer(model, args, ...)                 # under torchrun
        mg.optimize(trainer.model)
        share_base(trainer.model, monograph.distributed.join())

    Call it on every rank, on the module that DDP will wrap. Reads the frozen parameters once; one that is not
    the same on all ranks is an error with its name.
    """
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    found = {name: f"{p.dtype} {tuple(p.shape)} {_digest(p)}" for name, p in frozen.items()}
    for rank, theirs in enumerate(world.gathered(found)):
        other = next((name for name in {**found, **theirs} if found.get(name) != theirs.get(name)), None)
        if other is not None:
            raise ValueError(
                f"share_base: {other} differs between rank {world.rank} and rank {rank}, wanted the same "
                "base on every rank"
            )
    leave_out_of_ddp(model, list(frozen))
    return sum(p.numel() * p.element_size() for p in frozen.values())
