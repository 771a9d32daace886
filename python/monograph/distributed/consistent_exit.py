"""The way out of a block in which ranks had whole tensors: all ranks keep what was written, or none does.

Each rank says how it leaves, and checksums of all bytes that it holds: a write through `.data` leaves no
other trace, and one into bytes that another rank stores would be lost. One exchange, on every way out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from monograph.distributed.sharded_layer import ShardGroup
from monograph.distributed.unsharded_unit import ModulesBefore, UnshardedUnit
from monograph.distributed.world import gathered_over
from monograph.upstream.torch_names import process_group_named


class Early(Exception):
    """A loop that was left before its end: no failure if all ranks leave it there."""


@dataclass
class _Exit:
    """How a rank leaves. failed: what went wrong. checksums: by unit and piece."""

    rank: int
    failed: str | None = None
    early: bool = False
    checksums: dict[str, dict[str, int]] = field(default_factory=dict)


def consistent_exit(
    name: str, units: Mapping[str, UnshardedUnit], before: ModulesBefore, failed: BaseException | None = None
) -> None:
    """Shards units again. failed: what ended the block on this rank; it is raised again.

    If any rank failed, holds tensors that cannot be sharded, or other bytes than the others, every rank
    raises, with its shards of before.
    """
    if not units:
        if failed is not None and not isinstance(failed, Early):
            raise failed
        return
    own = _Exit(dist.get_rank(), early=isinstance(failed, Early))
    written: dict[str, torch.Tensor | None] = {}
    if failed is None or own.early:
        try:
            _check(name, units)
            own.checksums = {path: unit.checksums() for path, unit in units.items()}
            written = {path: unit.written() for path, unit in units.items()}
        except Exception as error:
            failed = error
    if failed is not None and not isinstance(failed, Early):
        own.failed = f"{type(failed).__name__}: {failed}"
    try:
        ranks = _of_all(next(iter(units.values())).group, own)
    except BaseException as lost:  # a rank that is gone
        _bring_back(units, before)
        raise (lost if failed is None or own.early else failed) from lost
    if all(one.failed is None and one.early == own.early for one in ranks):
        if all(one.checksums == own.checksums for one in ranks):
            for path, unit in units.items():
                unit.reshard(written[path])
            return
        _bring_back(units, before)
        raise RuntimeError(_difference(name, units, ranks))
    _bring_back(units, before)
    if own.failed is not None and failed is not None:
        raise failed
    raise RuntimeError(_failures(name, ranks))


def _bring_back(units: Mapping[str, UnshardedUnit], before: ModulesBefore) -> None:
    try:
        before.bring_back()
    finally:
        for unit in units.values():
            unit.put_back()


def _check(name: str, units: Mapping[str, UnshardedUnit]) -> None:
    for path, unit in units.items():
        if problem := unit.problem():
            raise RuntimeError(
                f"{name}: {path}.{problem}, so that it cannot be sharded across ranks again; the base is as "
                "it was before on all ranks; wanted monograph.unshard(model) for such a change"
            )


def _of_all(group: ShardGroup, own: _Exit) -> list[_Exit]:
    """Of the ranks that share a replica, and of all other replicas."""
    found = gathered_over(process_group_named(group.name), own)
    if not group.replicas:
        return found
    replicas = gathered_over(process_group_named(group.replicas), found)
    return [one for replica in replicas for one in replica]


def _difference(name: str, units: Mapping[str, UnshardedUnit], ranks: list[_Exit]) -> str:
    first = ranks[0].checksums
    path, piece = next(
        (path, piece)
        for path in units
        for piece in first[path]
        if len({one.checksums[path][piece] for one in ranks}) > 1
    )
    before = units[path].checksums_before()[piece]
    writers = sorted(one.rank for one in ranks if one.checksums[path][piece] != before)
    return (
        f"{name}: {path}.{piece} was written on {_named(writers)} of {len(ranks)}, and not all ranks hold "
        "the same bytes now, wanted the same change on all ranks; the base is as it was before on all ranks"
    )


def _failures(name: str, ranks: list[_Exit]) -> str:
    found = sorted((one.rank, one.failed) for one in ranks if one.failed is not None)
    said = "; ".join(f"rank {rank}: {text}" for rank, text in found)
    if not said:
        said = f"{_named(sorted(one.rank for one in ranks if one.early))} left the loop, others did not"
    return f"{name}: {said}; the base is as it was before on all ranks"


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
