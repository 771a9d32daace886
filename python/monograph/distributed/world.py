"""World: the processes that train together, and this one's place among them.

    world = join(timeout=600)      # under torchrun or accelerate launch; alone() without them
    world.rank, world.size

Everything that works over several processes takes a World, so that one process is no special case of the
environment, and a test may hold several groups.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from monograph.distributed.store_prefix import store_prefix

_WANTED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Processes need seconds to minutes to start and to import; a timeout of collectives may be shorter.
START_SECONDS = 300.0


@dataclass(frozen=True)
class World:
    """rank of `size` processes; local_rank: on this host. group: torch's, None for one process.

    timeout: seconds that a collective waits. name: before all keys of this start in the store; empty if the
    group was made elsewhere. heartbeats: where each rank is (heartbeat.py), None if nobody watches.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    group: Any = None
    timeout: float = 1800.0
    name: str = ""
    heartbeats: Any = None

    @property
    def first(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """Where a tensor lies that the group carries: a group of NCCL takes none of the host."""
        return torch.device("cpu") if self.size == 1 else device_of(self.group)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(self.group)

    def gathered(self, value: Any) -> list[Any]:
        """`value` of every rank, in their order. For small things outside of graphs."""
        return [value] if self.size == 1 else gathered_over(self.group, value)

    def of_first(self, value: Any) -> Any:
        """`value` of rank 0, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group_src=0, group=self.group)
        return box[0]

    def keys(self, timeout: float) -> Any:
        """The store of this start, by a connection of its own; timeout: seconds of one question."""
        return PrefixStore(self.name, connect(timeout))

    def doing(self, phase: str, detail: str = "") -> None:
        """Says to the others what this rank does next: a key of heartbeat.PHASES."""
        if self.heartbeats is not None:
            self.heartbeats.at(phase, detail)


def device_of(group: Any) -> torch.device:
    """The host if a group of torch's has a backend for it, as gloo; else the current device of its kind."""
    devices = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
    return torch.device("cpu" if "cpu" in devices else devices[0])


def gathered_over(group: Any, value: Any) -> list[Any]:
    """`value` of every rank of a group of torch's, None for all that were started."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def alone() -> World:
    return World()


def asked_size() -> int:
    """How many processes the launcher has started, by the environment."""
    text = os.environ.get("WORLD_SIZE") or "1"
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"WORLD_SIZE is {text!r}, wanted a number of processes, 1 or more")
    return int(text)


def store_address() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def connect(timeout: float, *, host_it: bool = False) -> Any:
    """A new connection to the store of the launcher; host_it: this process is the store too."""
    host, port = store_address()
    return TCPStore(
        host,
        port,
        is_master=host_it,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        multi_tenant=host_it,
    )


def join(timeout: float = 1800.0, backend: str = "gloo") -> World:
    """The processes that torchrun or `accelerate launch` started; alone() if it is one.

    timeout: seconds that a collective waits for the others.
    """
    size = asked_size()
    if size == 1:
        return alone()
    missing = [name for name in _WANTED if name not in os.environ]
    if missing:
        raise ValueError(
            f"WORLD_SIZE is {size}, but {', '.join(missing)} is not set; wanted a start by torchrun"
        )
    name = ""
    if not dist.is_initialized():
        rank = int(os.environ["RANK"])
        # torchrun's own process has the store, and keeps it, with all that is in it, when it starts anew.
        of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = connect(max(timeout, START_SECONDS), host_it=rank == 0 and not of_launcher)
        name = store_prefix(store, rank, size, max(timeout, START_SECONDS))
        keys = PrefixStore(f"{name}/group", store)
        dist.init_process_group(
            backend, store=keys, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
        )
    if dist.get_world_size() != size:
        raise ValueError(f"WORLD_SIZE is {size}, but the process group has {dist.get_world_size()} ranks")
    rank = dist.get_rank()
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    return World(rank, size, local_rank, dist.group.WORLD, timeout, name)


def leave(world: World) -> None:
    """Ends the group at the end of a run; a process that goes without it leaves warnings.

    The World has no group then: gloo's threads end with the last reference, and one that frees a tensor while
    the interpreter goes down ends the process by signal 6.
    """
    if world.size > 1 and dist.is_initialized():
        dist.destroy_process_group()
        object.__setattr__(world, "group", None)  # frozen for everybody else
