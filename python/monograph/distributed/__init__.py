"""Several processes: a World of ranks, sums over them in a fixed order, and a base that is cut among them."""

from monograph.distributed.shard import shard, shard_group_of
from monograph.distributed.world import World, alone, join, leave

__all__ = ["World", "alone", "join", "leave", "shard", "shard_group_of"]
