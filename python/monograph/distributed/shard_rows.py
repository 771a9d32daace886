"""ShardRows: a rank's bytes of a unit as torch's checkpoints know them, a DTensor [rows, 16] cut by Shard(0).

The rows are those of the whole unit, so that their number does not depend on the number of ranks, and the cut
is torch's own: the last ranks have fewer rows, or none. `torch.distributed.checkpoint` saves and loads it in
place, on any number of ranks. What one rank would write alone, as torch.save, pickle and safetensors do, is
an error that names it.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from monograph.distributed.layer_bytes import ALIGNMENT, Layout


class ShardRows(DTensor):
    """See the module's first lines. place: its name in the state dict."""

    place: str

    def refuse(self, how: str) -> NoReturn:
        size, rank = self.device_mesh.size(-1), self.device_mesh.get_local_rank(-1)
        raise RuntimeError(
            f"{how}: {self.place} is sharded over {size} ranks, and this is the part of rank {rank} alone; "
            "wanted torch.distributed.checkpoint, which writes all parts, "
            "monograph.distributed.save_full.save_pretrained for a folder, or monograph.unsharded(model) "
            "around what reads whole tensors"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.refuse("pickle or torch.save")

    def storage(self) -> Any:
        self.refuse("storage, as safetensors reads it")

    def untyped_storage(self) -> Any:
        self.refuse("storage, as safetensors reads it")

    def numpy(self, *, force: bool = False) -> Any:
        self.refuse("numpy")

    # Copies are refused in the same way. What else is computed with it is an ordinary DTensor.

    def detach(self) -> ShardRows:
        return self._like(self.to_local().detach())

    def clone(self, *, memory_format: torch.memory_format | None = None) -> ShardRows:
        return self._like(self.to_local().clone())

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardRows:
        memo[id(self)] = made = self.clone()
        return made

    def _like(self, local: torch.Tensor) -> ShardRows:
        return _made(local, self.device_mesh, self.shape[0], self.place)


def shard_rows(shard: torch.Tensor, layout: Layout, rank: int, mesh: DeviceMesh, place: str) -> ShardRows:
    """A view of the shard of a rank, uint8 [layout.bytes_per_rank], without what pads it."""
    own = layout.rows_of(rank)
    return _made(shard.detach().view(-1, ALIGNMENT)[:own], mesh, layout.rows, place)


def _made(local: torch.Tensor, mesh: DeviceMesh, rows: int, place: str) -> ShardRows:
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    whole = torch.Size((rows, ALIGNMENT))
    made: Any = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole, stride=(ALIGNMENT, 1)
    )
    made.__class__ = ShardRows
    made.place = place
    return made
