"""shard: the frozen tensors of a model, sharded across ranks: one row of bytes for each decoder layer.

Units are the decoder layers, the embedding, the head (one unit with the embedding if they are tied) and every
other module that holds more than 1 MiB of frozen parameters itself. What is trained, adapters that are not
active, buffers and what is left stay whole on each rank.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from monograph.distributed.file_ranges import RangeReader
from monograph.distributed.fully_sharded import refuse_fully_sharded
from monograph.distributed.layer_bytes import Layout
from monograph.distributed.same_models import adapter_modules, compare, constants_of_adapters, digests
from monograph.distributed.shard_placeholder import ExpertPlaceholder, ShardPlaceholder
from monograph.distributed.sharded_layer import ShardedLayer, ShardGroup, ShardSpec
from monograph.distributed.world import World, gathered_over
from monograph.nn.repeated_layers import has_regions, repeated_layers
from monograph.upstream.instance_class import put_before
from monograph.upstream.torch_names import children, parameters_of, process_group_named

SMALLEST_REST = 1 << 20  # bytes that a module beside layers, embedding and head must hold to be sharded


def shard(model: nn.Module, mesh: Any) -> nn.Module:
    """Cuts the frozen tensors of a model among ranks, in place, and returns it; each rank keeps its part.

    mesh: a World, a DeviceMesh of one dimension, or one of two named ("replicate", "shard"): tensors are cut
    within the second and copied across the first. Every rank has the whole model before (a mapped folder
    costs nothing), with its adapters, after `monograph.optimize` and before TrainStep.

        world = monograph.distributed.join()
        model = mg.add_lora(mg.from_pretrained(folder), LoraConfig(r=16, target_modules="all-linear"))
        mg.shard(model, world)
        step = TrainStep(model, world=world)

    A forward gathers one unit at a time, and so does backward; nothing gathered is kept between. All ranks
    must run the same forwards. What is computed has the bits of the whole model. Outside of a forward a
    frozen tensor raises; `monograph.unsharded(model)` brings whole ones.
    """
    world = shard_world(mesh)
    if world.size == 1:
        return model
    _check(model)
    group = ShardGroup(world.group.group_name, world.rank, world.size, _replicas(mesh), _mesh(mesh, model))
    units = units_of(model)
    with RangeReader() as reader:
        _check_alike(model, units, reader, _groups(world, group))
        for unit in units:
            _cut(unit, group, reader)
    _check_replicas(units, group)
    return model


def shard_world(mesh: Any) -> World:
    """The ranks that hold one replica together."""
    if isinstance(mesh, World):
        return mesh
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"shard: mesh is {mesh!r}, wanted a World, as monograph.distributed.join() gives, or a DeviceMesh"
        )
    names = mesh.mesh_dim_names
    if mesh.ndim == 2 and names == ("replicate", "shard"):
        mesh = mesh["shard"]
    elif mesh.ndim != 1:
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions named {names}, wanted one, or two named ('replicate', 'shard')"
        )
    rank = mesh.get_local_rank()
    return World(rank, mesh.size(), rank, mesh.get_group() if mesh.size() > 1 else None)


def _replicas(mesh: Any) -> str:
    """The name of the group across replicas, empty without them."""
    if isinstance(mesh, World) or mesh.ndim == 1 or mesh.size(0) == 1:
        return ""
    return str(mesh.get_group("replicate").group_name)


def _mesh(mesh: Any, model: nn.Module) -> DeviceMesh:
    """The mesh that a state dict places shards on: it must not move them."""
    devices = {p.device.type for p in model.parameters()} - {"meta"}
    device = next(iter(devices), "cpu")
    if isinstance(mesh, World):
        return DeviceMesh.from_group(mesh.group, device)
    if devices and devices != {mesh.device_type}:
        raise ValueError(
            f"shard: mesh is of {mesh.device_type} and the model on {', '.join(sorted(devices))}, "
            "wanted both on the same device"
        )
    return mesh


def shard_group_of(model: nn.Module) -> World | None:
    """The ranks that a model is sharded across: they must run the same forwards. None for a whole model."""
    for unit in sharded_units(model).values():
        own = unit.shard_spec.group
        return World(own.rank, own.size, own.rank, process_group_named(own.name))
    return None


def sharded_units(model: nn.Module) -> dict[str, ShardedLayer]:
    """The modules that gather in their forward, by path; a head tied to the embedding is one too."""
    return {path: module for path, module in model.named_modules() if isinstance(module, ShardedLayer)}


class _Unit:
    """users: the modules that gather it, by path, the one that holds it first. tensors: by the name of the
    piece. places: of each user."""

    def __init__(
        self, users: dict[str, nn.Module], adapters: set[nn.Module], *, whole_modules: bool = True
    ) -> None:
        self.users = users
        self.tensors: dict[str, nn.Parameter] = {}
        self.places: dict[str, list[tuple[str, str, str]]] = {path: [] for path in users}
        names: dict[nn.Parameter, str] = {}
        for user, root in users.items():
            for path, module in root.named_modules() if whole_modules else [("", root)]:
                for name, parameter in _frozen(module, adapters):
                    full = f"{path}.{name}" if path else name
                    full = f"{user}.{full}" if full in self.tensors else full
                    piece = names.setdefault(parameter, full)
                    self.tensors[piece] = parameter
                    self.places[user].append((path, name, piece))

    @property
    def path(self) -> str:
        return next(iter(self.users))


def _frozen(module: nn.Module, adapters: set[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """The frozen parameters that a module holds itself."""
    if module in adapters:
        return []
    own = parameters_of(module).items()
    # Spread experts are another rank's business: they are not gathered.
    return [
        (name, p)
        for name, p in own
        if p is not None and not p.requires_grad and not isinstance(p, ExpertPlaceholder)
    ]


def units_of(model: nn.Module) -> list[_Unit]:
    adapters = adapter_modules(model)
    paths = {module: path for path, module in model.named_modules()}
    causal: Any = model
    causal = causal.get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(causal, "get_input_embeddings"):
        raise ValueError(
            f"shard: model is a {type(causal).__name__} without get_input_embeddings, wanted a transformers "
            "model, with PEFT or without"
        )
    groups: list[dict[str, nn.Module]] = [{path: layer} for path, layer in repeated_layers(model).items()]
    found = [_holder(end) for end in (causal.get_input_embeddings(), causal.get_output_embeddings())]
    # A trained bias would make the loss keep the weight beside it.
    ends = [end for end in found if end in paths and not any(p.requires_grad for p in end.parameters(False))]
    tensors = [{id(p) for p in end.parameters() if not p.requires_grad} for end in ends]
    tied = len(ends) == 2 and bool(tensors[0] & tensors[1])
    groups += [{paths[end]: end for end in ends}] if tied else [{paths[end]: end} for end in ends]
    units = [unit for unit in (_Unit(group, adapters) for group in groups) if unit.tensors]
    known = {id(p) for unit in units for p in unit.tensors.values()}
    for path, module in model.named_modules():
        own = [p for _, p in _frozen(module, adapters) if id(p) not in known]
        if sum(p.nbytes for p in own) > SMALLEST_REST:
            units.append(_Unit({path: module}, adapters, whole_modules=False))
            known.update(id(p) for p in own)
    _check_owners(units)
    return units


def _holder(end: Any) -> Any:
    """The module that reads the frozen weight: inside PEFT's `modules_to_save` the original one."""
    if end is None or not {"original_module", "modules_to_save"} <= children(end).keys():
        return end
    return children(end)["original_module"]


def _check(model: nn.Module) -> None:
    if sharded_units(model):
        raise ValueError("shard: the model is sharded already, wanted a whole one")
    refuse_fully_sharded(model, "shard")
    if has_regions(model):
        raise ValueError(
            "shard: the model has regions, wanted monograph.shard before TrainStep and make_regions, or "
            "monograph.training.regions.undo_regions(model) before"
        )


def _check_owners(units: list[_Unit]) -> None:
    owners: dict[int, str] = {}
    for unit in units:
        for piece, parameter in unit.tensors.items():
            before = owners.setdefault(id(parameter), unit.path)
            if before != unit.path:
                raise ValueError(
                    f"shard: {unit.path}.{piece} is a parameter of {before} too, wanted frozen parameters "
                    "that only one layer holds"
                )
        for path, root in unit.users.items():
            if "forward" in vars(root):
                raise ValueError(f"shard: {path} has a forward of somebody else, wanted its own")


def _groups(world: World, group: ShardGroup) -> list[Any]:
    """Of the ranks that hold a replica together, and of those that hold one part in each replica."""
    return [world.group, *([process_group_named(group.replicas)] if group.replicas else [])]


def _check_alike(model: nn.Module, units: list[_Unit], reader: RangeReader, groups: list[Any]) -> None:
    """Ranks with other models would gather rubbish. Of what is sharded a sample is compared, as few bytes are
    read; adapters' constants and what stays whole are compared to the last byte."""
    compare("shard", lambda: constants_of_adapters(model), groups)
    cut = {id(p) for unit in units for p in unit.tensors.values()}

    def described() -> dict[str, str]:
        found = {}
        for unit in units:
            for piece in Layout.of(unit.tensors, 1).pieces:
                found[f"{unit.path}.{piece.name}"] = f"{piece.dtype} {list(piece.shape)}"
            sample = hashlib.sha256(reader.sample(unit.tensors)).hexdigest()[:16]
            found[f"a sample of {unit.path}"] = f"of SHA-256 {sample}"
        frozen = ((n, p) for n, p in model.named_parameters() if not p.requires_grad and id(p) not in cut)
        whole = ((n, p) for n, p in frozen if not isinstance(p, ExpertPlaceholder))
        return found | digests(whole) | digests(model.named_buffers())

    compare("shard", described, groups)


def _check_replicas(units: list[_Unit], group: ShardGroup) -> None:
    """Every replica holds the same bytes: each rank has its part in memory, and compares all of it."""
    if not group.replicas:
        return
    held = ((f"{unit.path}.shard", vars(unit.users[unit.path])["shard"]) for unit in units)
    trouble = None
    try:
        compare("shard", lambda: digests(held), [process_group_named(group.replicas)])
    except ValueError as error:
        trouble = str(error)
    for told in gathered_over(process_group_named(group.name), trouble):
        if told is not None:
            raise ValueError(told)


@torch.no_grad()
def _cut(unit: _Unit, group: ShardGroup, reader: RangeReader) -> None:
    layout = Layout.of(unit.tensors, group.size)
    mine = reader.read(unit.tensors, layout, group.rank)
    holder = unit.users[unit.path]
    for path, root in unit.users.items():
        for inner, name, _ in unit.places[path]:
            own = parameters_of(root.get_submodule(inner))
            if not isinstance(own[name], ShardPlaceholder):
                full = ".".join(part for part in (path, inner, name) if part)
                own[name] = ShardPlaceholder(own[name], full, group.size)  # type: ignore[arg-type]
        put_before(ShardedLayer, root)
        user: Any = root
        user.shard_spec = ShardSpec(
            layout, group, tuple(unit.places[path]), not isinstance(root, nn.Embedding)
        )
        vars(user)["shard_holder"] = () if root is holder else (holder,)
    # No parameter of the module. Its class tells compilers that its size does not change.
    vars(holder)["shard"] = nn.Parameter(mine, requires_grad=False)
