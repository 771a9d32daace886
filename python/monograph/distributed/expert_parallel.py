"""expert_parallel: the packed experts of a model over ranks, each of which keeps its own and serves all.

Unlike `monograph.shard`, nothing is gathered: tokens go to the owners of their experts and come back, in
`monograph::ep_experts`. What is computed has the bits of the whole model on one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from monograph.distributed.expert_adapter import cut_factors, group_of_layer
from monograph.distributed.expert_exchange import ExpertExchange
from monograph.distributed.expert_group import ExpertGroup
from monograph.distributed.expert_routes import owned
from monograph.distributed.file_ranges import RangeReader
from monograph.distributed.fully_sharded import refuse_fully_sharded
from monograph.distributed.same_models import compare, digests
from monograph.distributed.shard import sharded_units
from monograph.distributed.shard_placeholder import ExpertPlaceholder
from monograph.distributed.world import World, alone
from monograph.nn.packed_experts import ExpertShare, PackedExperts
from monograph.nn.repeated_layers import has_regions
from monograph.ops.ep_experts import register_group
from monograph.quant.stack_pair import tensors_of, with_tensors
from monograph.upstream.torch_names import parameters_of

_OP = "expert_parallel"
_STACKS = ("gate_up_proj", "up_proj", "down_proj")  # of dense experts, as transformers names them


def expert_parallel(
    model: nn.Module, world: World, size: int | None = None, *, adapter: bool = True
) -> nn.Module:
    """Spreads the packed experts of a model over each `size` neighbouring ranks, in place, and returns it.

    size: a divisor of the number of ranks; None: all of them. Every rank has the whole model before (a mapped
    folder costs nothing), with its adapters, after `monograph.optimize` and before `monograph.shard` and
    TrainStep.

        world = monograph.distributed.join()
        model = mg.add_lora(mg.from_pretrained(folder), LoraConfig(r=16), experts=True)
        mg.expert_parallel(model, world)
        step = TrainStep(model, world=world)

    Rank r of n keeps the experts [r E // n, (r + 1) E // n) of each layer; n need not divide E. With
    `adapter` it keeps the LoRA factors of those experts alone, and TrainStep their gradients and moments: no
    gradient of an expert is sent. Without, each rank has the whole adapter, and the gradient of a factor is
    that of this rank's tokens, for a trainer that sums gradients over ranks itself. All ranks must run the
    same number of forwards and backwards, each of its own tokens; a rank without any still calls. Outside of
    a forward the tensors of experts raise.
    """
    size = world.size if size is None else size
    if size < 1 or world.size % size:
        raise ValueError(f"{_OP}: size is {size}, wanted a divisor of {world.size}, the number of ranks")
    if size == 1:
        return model
    layers = _layers(model, size)
    group = _group(world, size)
    number = register_group(ExpertExchange(group))
    with RangeReader() as reader:
        compare(_OP, lambda: _described(model, layers, reader), [world.group])
        for path, layer in layers.items():
            _cut(path, layer, group, number, reader, adapter)
    if adapter:
        cut_factors(model)
    return model


def expert_layers(model: nn.Module) -> dict[str, PackedExperts]:
    """The layers whose experts are spread over ranks, by path."""
    named = model.named_modules()
    return {p: m for p, m in named if isinstance(m, PackedExperts) and m.expert_share is not None}


def expert_group_of(model: nn.Module) -> ExpertGroup | None:
    """The ranks over which the experts of a model are spread; None if they are not."""
    for layer in expert_layers(model).values():
        return group_of_layer(layer)
    return None


def _layers(model: nn.Module, size: int) -> dict[str, PackedExperts]:
    if expert_layers(model):
        raise ValueError(f"{_OP}: the experts are spread already, wanted a whole model")
    if sharded_units(model):
        raise ValueError(f"{_OP}: the model is sharded, wanted monograph.{_OP} before monograph.shard")
    refuse_fully_sharded(model, _OP)
    if has_regions(model):
        raise ValueError(f"{_OP}: the model has regions, wanted monograph.{_OP} before TrainStep")
    found = {}
    for path, layer in model.named_modules():
        if isinstance(layer, PackedExperts):
            _check(path, layer, size)
            found[path] = layer
            continue
        own = parameters_of(layer)
        for name in _STACKS:
            stack = own.get(name)
            if stack is not None and stack.dim() == 3:
                _refuse_dense(f"{path}.{name}", stack)
    if not found:
        raise ValueError(f"{_OP}: the model has no packed experts, wanted a mixture of experts")
    return found


def _refuse_dense(name: str, stack: torch.Tensor) -> None:
    how = "are trained" if stack.requires_grad else "are dense"
    raise ValueError(
        f"{_OP}: the experts of {name} {how}, wanted a quantised base (adapter: qlora, or a folder by "
        "`monograph quantize`) with LoRA on its experts"
    )


def _check(path: str, layer: PackedExperts, size: int) -> None:
    for name in layer.experts_kind.names:
        if name not in layer.stacks:
            _refuse_dense(f"{path}.{name}", parameters_of(layer)[name])  # type: ignore[arg-type]
    for name, parameter in parameters_of(layer).items():
        if parameter is not None and parameter.requires_grad:
            raise ValueError(f"{_OP}: {path}.{name} is trained, wanted LoRA factors alone on experts")
    count = layer.stacks[layer.experts_kind.names[0]].shape[0]
    if size > count:
        raise ValueError(f"{_OP}: size is {size}, and {path} has {count} experts; wanted {count} or less")


def _group(world: World, size: int) -> ExpertGroup:
    """Of this rank. Where the world is all ranks there are, a group of torch's own: other collectives do not
    come between. All ranks make all groups."""
    ranks = dist.get_process_group_ranks(world.group)
    first = world.rank // size * size
    if len(ranks) < dist.get_world_size() and size == world.size:
        return ExpertGroup(world.rank, size, world.group)
    mine: Any = None
    copies, place = alone(), world.rank // size
    settings: Any = {"timeout": timedelta(seconds=world.timeout), "backend": dist.get_backend(world.group)}
    for begin in range(0, world.size, size):
        made = dist.new_group(ranks[begin : begin + size], **settings)
        mine = made if begin == first else mine
    for rank in range(size if size < world.size else 0):
        made = dist.new_group(ranks[rank::size], **settings)
        if rank == world.rank - first:
            copies = World(place, world.size // size, world.local_rank, made, world.timeout)
    return ExpertGroup(world.rank - first, size, mine, place=place, copies=copies)


def _described(model: nn.Module, layers: Mapping[str, PackedExperts], reader: RangeReader) -> dict[str, str]:
    """Ranks with other models would compute rubbish. Of each layer a sample is compared, as few bytes are
    read; what is trained is compared whole."""
    found = digests((name, p) for name, p in model.named_parameters() if p.requires_grad)
    for path, layer in layers.items():
        tensors = _tensors(layer)
        for name, tensor in tensors.items():
            found[f"{path}.{name}"] = f"{tensor.dtype} {list(tensor.shape)}"
        found[f"a sample of {path}"] = reader.sample(tensors).hex()
    return found


def _tensors(layer: PackedExperts) -> dict[str, torch.Tensor]:
    return {name: p for name, p in parameters_of(layer).items() if p is not None}


@torch.no_grad()
def _cut(
    path: str, layer: PackedExperts, group: ExpertGroup, number: int, reader: RangeReader, adapter: bool
) -> None:
    names = layer.experts_kind.names
    count = layer.stacks[names[0]].shape[0]
    mine = owned(group.rank, group.size, count)
    kept: dict[str, torch.Tensor] = {}
    for name in names:
        part = layer.packed(name).slice_experts(mine.start, len(mine))
        kept |= dict(zip(layer.stored_names(name), tensors_of(part), strict=True))
        if layer.experts_kind.bias:
            bias: Any = getattr(layer, f"{name}_bias")
            kept[f"{name}_bias"] = bias.detach()[mine.start : mine.stop]
        layer.stacks[name] = with_tensors(part, tensors_of(layer.stacks[name]))  # of no memory
    own = parameters_of(layer)
    for name, tensor in kept.items():
        copied = reader.copy(f"{path}.{name}", tensor)
        own[name] = ExpertPlaceholder(own[name], f"{path}.{name}", group.size)  # type: ignore[arg-type]
        # No parameter of the module: who walks over those takes no rank's experts for those of all.
        vars(layer)[name] = nn.Parameter(copied, requires_grad=False)
    layer.expert_share = ExpertShare(mine.start, len(mine), count, number, group.size, adapter)
