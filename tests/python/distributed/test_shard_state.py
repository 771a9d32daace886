"""A sharded model in the hands of torch: its state dict, checkpoints on other numbers of ranks, and DDP."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import monograph as mg
from monograph.distributed.file_ranges import read_range
from monograph.distributed.layer_bytes import Layout
from monograph.distributed.shard import sharded_units, units_of
from support.run_ranks import message, run_ranks
from support.sharded_cases import batch, llama, same_bits

pytestmark = pytest.mark.slow


def other_base(**options):
    """The same model with other bytes in every frozen tensor."""
    model = llama(layers=2, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.view(-1).view(torch.uint8).add_(1)
    return model


@torch.no_grad()
def logits(model):
    return model.eval()(**batch()).logits


def shards(model):
    return {
        path: unit.shard.detach().clone()
        for path, unit in sharded_units(model).items()
        if not unit.shard_holder
    }


def same_shards(model, before):
    return [path for path, shard in shards(model).items() if not torch.equal(shard, before[path])]


def rows_are_the_cut(model, whole, ranks, rank, placements):
    """Every unit is one entry whose length is that of the row on one rank, and whose local part is a view of
    the shard; no name of what is away is left."""
    found = model.state_dict()
    wrong = []
    for unit in units_of(whole):
        rows = found.pop(f"{unit.path}.shard")
        row = read_range(unit.tensors, Layout.of(unit.tensors, 1), 0)
        own = model.get_submodule(unit.path).shard
        share = -(-len(row) // 16 // ranks)
        local = rows.to_local()
        right = (
            isinstance(rows, DTensor)
            and rows.placements == placements
            and rows.shape == (len(row) // 16, 16)
            and torch.equal(rows.full_tensor().view(-1), row)
            and torch.equal(local, row.view(-1, 16)[rank * share :][:share])
            and (local.numel() == 0 or local.data_ptr() == own.data_ptr())
            and own.numel() == share * 16
        )
        wrong += [] if right else [unit.path]
    left = found.keys() - {name for name, p in whole.named_parameters() if p.requires_grad}
    return wrong, sorted(left & {name for unit in units_of(whole) for name in names_of(unit)})


def names_of(unit):
    return [
        ".".join(part for part in (user, path, name) if part)
        for user, places in unit.places.items()
        for path, name, _ in places
    ]


def save_and_load(world, folder):
    found = {}
    for kind, options in (("plain", {}), ("tied", {"tied": True})):
        whole = llama(layers=2, **options)
        wanted = logits(whole)
        model = mg.shard(copy.deepcopy(whole), world)
        found[kind] = {"cut": rows_are_the_cut(model, whole, 2, world.rank, (Shard(0),))}
        dcp.save(model.state_dict(), checkpoint_id=f"{folder}/{kind}")
        found[kind] |= loaded(world, f"{folder}/{kind}", wanted, **options)
        found[kind] |= by_state_dict(model, world, wanted, **options)
    return found


def loaded(mesh, folder, wanted, **options):
    """In place, as DCP loads; then through torch's own functions."""
    model = mg.shard(other_base(**options), mesh)
    before = same_bits(logits(model), wanted)
    dcp.load(model.state_dict(), checkpoint_id=folder)
    in_place = same_bits(logits(model), wanted)
    model = mg.shard(other_base(**options), mesh)
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state)
    return {"other": not before, "in place": in_place, "by torch": same_bits(logits(model), wanted)}


def by_state_dict(model, world, wanted, **options):
    """load_state_dict of what state_dict gave, of whole rows on one process, and into copies."""
    found = {}
    twin = mg.shard(other_base(**options), world)
    twin.load_state_dict(model.state_dict())
    found["load_state_dict"] = same_bits(logits(twin), wanted)
    twin = mg.shard(other_base(**options), world)
    result = twin.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    found["assign"] = same_bits(logits(twin), wanted) and not (*result.missing_keys, *result.unexpected_keys)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    twin = mg.shard(other_base(**options), world)
    twin.load_state_dict(full)
    found["full"] = type(full["base_model.model.model.layers.0.shard"]) is torch.Tensor and same_bits(
        logits(twin), wanted
    )
    adapter = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    missing = twin.load_state_dict(adapter, strict=False).missing_keys
    found["only missing"] = all(name.endswith(".shard") or "norm.weight" in name for name in missing)
    return found


def other_ranks(world, folder):
    """Three ranks: the last has fewer rows. And two replicas of two."""
    found = {}
    for kind, options in (("plain", {}), ("tied", {"tied": True})):
        whole = llama(layers=2, **options)
        if world.size == 3:
            model = mg.shard(copy.deepcopy(whole), world)
            found[kind] = {"cut": rows_are_the_cut(model, whole, 3, world.rank, (Shard(0),))}
            found[kind] |= loaded(world, f"{folder}/{kind}", logits(whole), **options)
        else:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            model = mg.shard(copy.deepcopy(whole), mesh)
            placed = (Replicate(), Shard(0))
            found[kind] = {"cut": rows_are_the_cut(model, whole, 2, world.rank % 2, placed)}
            found[kind] |= loaded(mesh, f"{folder}/{kind}", logits(whole), **options)
            dcp.save(model.state_dict(), checkpoint_id=f"{folder}/{kind}-replicas")
            found[kind] |= loaded(world, f"{folder}/{kind}-replicas", logits(whole), **options)
    return found


class Around(nn.Module):
    """Somebody's module with the model in it."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, **kwargs):
        return self.inner(**kwargs)


def wrapped_by_ddp(world):
    """After mg.shard, around the model, its base or another module: no byte of a shard is another rank's."""
    found = {}
    for name, place in (
        ("model", lambda model: model),
        ("base", lambda model: model.get_base_model()),
        ("around", Around),
    ):
        whole = llama(layers=2)
        wanted = logits(whole)
        model = mg.shard(copy.deepcopy(whole), world)
        before = shards(model)
        wrapped = DistributedDataParallel(place(model))
        bits = same_bits(logits(model), wanted)
        for one in (whole, model):
            one.train()
        loss = wrapped(**batch(world.rank), use_cache=False).loss
        loss.backward()
        # Alone, the mean of what both ranks have.
        want = {}
        for rank in range(2):
            (whole(**batch(rank), use_cache=False).loss / 2).backward()
            want = {n: p.grad for n, p in whole.named_parameters() if p.requires_grad}
        got = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        off = [n for n in want if not torch.allclose(got[n].float(), want[n].float(), rtol=2e-2, atol=1e-4)]
        found[name] = {"changed": same_shards(model, before), "bits": bits, "gradients": off}
    return found


def in_tiles(weight):
    """As TRL's head reads it: no tile is computed if there seem to be no rows."""
    return sum(weight[begin : begin + 16].float().sum() for begin in range(0, weight.shape[0], 16))


def refused(world):
    model = mg.shard(llama(layers=1), world)
    state, stored = model.state_dict(), io.BytesIO()
    rows = state["base_model.model.model.layers.0.shard"]
    works = {
        "torch.save of a state dict": lambda: torch.save(state, stored),
        "torch.save of copies": lambda: torch.save({n: t.detach().clone() for n, t in state.items()}, stored),
        "torch.save of a deep copy": lambda: torch.save(copy.deepcopy(state), stored),
        "torch.save of a model": lambda: torch.save(model, stored),
        "pickle": lambda: pickle.dumps(model),
        "safetensors": lambda: save(dict(state)),
        "numpy": lambda: rows.numpy(),
        "a head in tiles": lambda: in_tiles(model.get_base_model().get_output_embeddings().weight),
    }
    found = {name: message(work) for name, work in works.items()}
    plain = DTensor.from_local(torch.zeros(3, 16, dtype=torch.uint8), rows.device_mesh, [Shard(0)])
    name = rows.place
    wrong = {"rows": torch.zeros(2, 16, dtype=torch.uint8), "dtype": rows.full_tensor().int(), "cut": plain}
    wrong["replicated"] = rows.redistribute(placements=[Replicate()])
    for kind, given in wrong.items():
        found[f"load {kind}"] = message(lambda: model.load_state_dict({**state, name: given}))  # noqa: B023
    found["load missing"] = message(
        lambda: model.load_state_dict({n: t for n, t in state.items() if n != name})
    )
    found["load unknown"] = message(lambda: model.load_state_dict({**state, "shard": rows}))
    mesh = init_device_mesh("meta", (world.size,))
    found["mesh"] = message(lambda: mg.shard(llama(layers=1), mesh))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="module")
def two(folder):
    return run_ranks(2, "distributed/test_shard_state:save_and_load", folder)


def check(results):
    for rank, result in enumerate(results):
        for kind, found in result.items():
            assert found.pop("cut") == [[], []], (rank, kind)
            assert all(found.values()), (rank, kind, found)


def test_a_checkpoint_of_torch_brings_every_byte_back(two):
    check(copy.deepcopy(two))


@pytest.mark.parametrize("ranks", [3, 4])
def test_a_checkpoint_of_torch_loads_on_another_number_of_ranks(two, folder, ranks):
    check(run_ranks(ranks, "distributed/test_shard_state:other_ranks", folder))


def test_ddp_around_a_sharded_model_leaves_its_bytes_alone():
    for rank, results in enumerate(run_ranks(2, "distributed/test_shard_state:wrapped_by_ddp")):
        for place, found in results.items():
            assert found == {"changed": [], "bits": True, "gradients": []}, (rank, place, found)


def test_what_one_rank_would_write_alone_is_refused_by_name():
    where = "base_model.model.model.layers.0"
    for rank, found in enumerate(run_ranks(2, "distributed/test_shard_state:refused")):
        for name, text in list(found.items())[:8]:
            assert "base_model.model." in text, (name, text)  # the first one that is met
            assert "is sharded over 2 ranks" in text, (name, text)
            assert "monograph.unsharded(model)" in text, (name, text)
        assert f"this is the part of rank {rank} alone" in found["torch.save of a state dict"]
        assert f"{where}.shard is torch.uint8 [2, 16], wanted torch.uint8 [" in found["load rows"]
        assert f"{where}.shard is torch.int32 [" in found["load dtype"]
        assert f"{where}.shard is torch.uint8 [6, 16], wanted torch.uint8 [" in found["load cut"]
        assert "placed by (Replicate()" in found["load replicated"]
        assert f'Missing key(s) in state_dict: "{where}.shard"' in found["load missing"]
        assert 'Unexpected key(s) in state_dict: "shard"' in found["load unknown"]
        assert "mesh is of meta and the model on cpu" in found["mesh"]
