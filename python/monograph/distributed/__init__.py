"""Several processes: a World of ranks, sums over them in a fixed order, and a base sharded across them."""

from monograph.distributed.replica_check import check_same_values
from monograph.distributed.shard import shard, shard_group_of
from monograph.distributed.shared_base import share_base
from monograph.distributed.tree import Order, Tree, TreeSum, padded, sum_over_ranks
from monograph.distributed.world import World, alone, join, leave

__all__ = [
    "Order",
    "Tree",
    "TreeSum",
    "World",
    "alone",
    "check_same_values",
    "join",
    "leave",
    "padded",
    "shard",
    "shard_group_of",
    "share_base",
    "sum_over_ranks",
]
