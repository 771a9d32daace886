"""ShardedLayer: a module whose frozen tensors are one row of bytes, sharded and gathered in forward.

Each rank holds the tensor `shard`, uint8: a plain attribute, no parameter and no buffer, so that nobody who
walks over those (DistributedDataParallel broadcasts them) takes one rank's bytes for all ranks'. In a state
dict it is a DTensor (shard_state.py) in the place of the parameters that it holds.

A forward gathers the row, puts views of it where its modules read their parameters, computes as ever and
takes them away. Backward gathers again: in a graph because the gather is a node that is repeated there, in
eager mode by notes (gather_again.py) or because a checkpoint repeats the forward. Gathered bytes are never
kept from forward to backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from monograph.distributed.layer_bytes import ALIGNMENT, Layout
from monograph.distributed.reshard_after_forward import kept_as_notes
from monograph.distributed.shard_placeholder import ShardPlaceholder
from monograph.distributed.shard_state import give_shard, take_shard
from monograph.upstream.torch_names import all_gathered, parameters_of


@dataclass(frozen=True)
class ShardGroup:
    """The ranks that hold one replica together. name: of torch's group. replicas: the name of the group of
    those that hold this part in each replica, empty if there is one replica. mesh: of all of them."""

    name: str
    rank: int
    size: int
    replicas: str = field(default="", compare=False, repr=False)
    mesh: Any = field(default=None, compare=False, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardGroup:
        return self  # a copy of a model is sharded across the same ranks


@dataclass(frozen=True)
class ShardSpec:
    """How a unit is sharded: all that a trace of it depends on.

    places: (path of a module, name of a parameter there, name of a piece), for all that is gathered.
    saved: whether backward reads what was gathered. It does not for an embedding.
    """

    layout: Layout
    group: ShardGroup
    places: tuple[tuple[str, str, str], ...]
    saved: bool
    hashed: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "hashed", hash((self.layout, self.group, self.places, self.saved)))

    def __hash__(self) -> int:
        return self.hashed  # traces are found by it at each call of a layer


class ShardedLayer(nn.Module):
    """shard_holder: () if the module holds `shard` itself, else (module that does,): a head tied to the
    embedding."""

    shard: nn.Parameter
    shard_spec: ShardSpec
    shard_holder: tuple[nn.Module, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and torch.is_grad_enabled() and self._must_be_repeated():
            # A compiler would keep what was gathered: it must not repeat collectives unless told to.
            return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)
        return self._forward(*args, **kwargs)

    def _must_be_repeated(self) -> bool:
        """Whether backward reads what is gathered, and nobody else repeats this forward there."""
        return self.shard_spec.saved and not (
            self.training and getattr(self, "gradient_checkpointing", False)
        )

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        with whole_and_again(self):
            return super().forward(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        give_shard(self, found, args[1] if len(args) > 1 else kwargs.get("prefix", ""))
        return found

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, *rest: Any
    ) -> None:
        take_shard(self, state_dict, prefix, missing, rest[-1])
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *rest)


def gathered_row(unit: ShardedLayer) -> torch.Tensor:
    """The whole row of a unit, uint8 [layout.nbytes]: one collective among the ranks of its group."""
    group = unit.shard_spec.group
    # Of another shape than the holder's own gather: a compiler would take two equal ones for one, and keep
    # the embedding's bytes until the head.
    holder: Any = unit.shard_holder[0] if unit.shard_holder else unit
    shard = holder.shard.view(-1, ALIGNMENT) if unit.shard_holder else holder.shard
    return all_gathered(shard, group.size, group.name).view(-1)


@contextmanager
def whole(unit: ShardedLayer, row: torch.Tensor) -> Iterator[None]:
    """Inside, the modules of a unit have views of a row of bytes where they read their parameters.

    The views are attributes of the instances, which Python finds before the parameters of a module: nothing
    is written that a graph would have to write back.
    """
    views = unit.shard_spec.layout.views(row)
    taken: list[tuple[dict[str, Any], str]] = []
    try:
        for path, name, piece in unit.shard_spec.places:
            module = unit.get_submodule(path)
            if is_away(module, name):  # not where somebody has put a whole one since
                module.__dict__[name] = views[piece]
                taken.append((module.__dict__, name))
        yield
    finally:
        for attributes, name in taken:
            del attributes[name]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_away(module: nn.Module, name: str) -> bool:
    return type(parameters_of(module).get(name)) is ShardPlaceholder


@contextmanager
def whole_and_again(unit: ShardedLayer) -> Iterator[None]:
    """`whole`, and in eager mode gathered again for a backward that reads it."""
    row = gathered_row(unit)
    with whole(unit, row):
        if torch.compiler.is_compiling() or type(row) is not torch.Tensor:  # a graph is traced
            yield
        else:
            with kept_as_notes(row, lambda: gathered_row(unit)):
                yield


def whole_if_sharded(module: nn.Module) -> AbstractContextManager[None]:
    """`whole`, for code that reads the tensors of a unit without its forward; nothing for any other module.
    Whatever autograd saves inside is kept."""
    return whole(module, gathered_row(module)) if isinstance(module, ShardedLayer) else nullcontext()
