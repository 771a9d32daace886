"""What `doctor` says about several ranks: gathers of a micro-batch, bytes, what stays whole."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any

from torch import nn
from torch.fx import GraphModule

from monograph.diagnosis.report import Gathers, Report
from monograph.distributed.shard import shard_group_of, sharded_units
from monograph.distributed.sharded_layer import ShardedLayer
from monograph.distributed.world import World
from monograph.training.regions import TRACES, region_layers
from monograph.upstream.torch_names import GATHER, dynamo_config, schema_of

Sizes = Counter[tuple[int, ...]]


def tracing_of(model: nn.Module) -> AbstractContextManager[Any]:
    """A sharded layer takes its gathered tensors away again, still within its checkpoint."""
    if not sharded_units(model):
        return nullcontext()
    return dynamo_config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True)


class GatherCount:
    """Gathers in the graphs of a micro-batch, by the shape of what a rank gives, forward and backward."""

    def __init__(self) -> None:
        self.seen: dict[str, Sizes] = {"forward": Counter(), "backward": Counter()}

    def add(self, way: str, graph: GraphModule | None) -> None:
        self.seen[way] += gathers_in(graph)


def gathers_in(graph: GraphModule | None) -> Sizes:
    found: Sizes = Counter()
    for node in graph.graph.nodes if graph is not None else ():
        schema = schema_of(node.target)
        if schema is not None and schema.name == GATHER:
            found[tuple(int(size) for size in node.args[0].meta["val"].shape)] += 1
    return found


def _add_regions(model: nn.Module, count: GatherCount) -> None:
    """A trace stands for all layers of its kind."""
    words = {layer.region_word for layer in region_layers(model).values()}
    for number, traced in TRACES.by_number.items():
        layers = len(words & TRACES.users[number])
        for way, graph in (("forward", traced.forward), ("backward", traced.backward)):
            for shape, times in gathers_in(graph).items():
                count.seen[way][shape] += times * layers


def _given(unit: ShardedLayer) -> tuple[int, ...]:
    """The shape that a unit gives to its gather."""
    size = unit.shard_spec.layout.bytes_per_rank
    return (size // 16, 16) if unit.shard_holder else (size,)


def look_at_shards(model: nn.Module, report: Report, count: GatherCount, world: World | None = None) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    report.gradient_bytes = 4 * sum(p.numel() for p in trained)
    group = shard_group_of(model)
    ranks = group if world is None else world
    report.ranks = 1 if ranks is None else ranks.size
    if group is None:
        return
    report.shard_ranks = group.size
    _add_regions(model, count)
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for path, unit in sharded_units(model).items():
        by_shape.setdefault(_given(unit), []).append(path)
        report.shard_bytes += 0 if unit.shard_holder else unit.shard_spec.layout.bytes_per_rank
    for shape, paths in by_shape.items():
        forward, backward = (count.seen[way][shape] for way in ("forward", "backward"))
        report.gathers.append(Gathers(paths, prod(shape), forward, backward))
    for way, seen in count.seen.items():
        sizes = sum(prod(shape) * times for shape, times in seen.items())
        report.received_bytes[way] = sizes * (group.size - 1)
    report.whole_bytes = _whole(model)


def _whole(model: nn.Module) -> dict[str, int]:
    """Bytes that each rank holds whole, by the reason why."""
    found: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            continue
        reason = "trained" if parameter.requires_grad else f"frozen, less than 1 MiB in its module: {name}"
        if not parameter.requires_grad and ("lora_" in name or "modules_to_save" in name):
            reason = "adapters that are not active"
        found[reason] = found.get(reason, 0) + parameter.nbytes
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    return found | ({"buffers": buffers} if buffers else {})


def compare_ranks(report: Report, world: World) -> None:
    """What other ranks found otherwise: a graph that breaks on one rank only leaves the others waiting."""
    mine = (report.graphs, len(report.breaks), len(report.recompiles), len(report.weight_copies))
    for rank, found in enumerate(world.gathered(mine)):
        if found != mine:
            numbers = "{} graphs, {} breaks, {} recompiles, {} copies of a weight".format(*found)
            report.other_ranks.append(f"rank {rank} has {numbers}")
