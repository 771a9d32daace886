"""Ranks whose group carries no tensor of the host, as one of NCCL: buffers are made on the model's device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from monograph.diagnosis.selftest import training
from monograph.distributed import World, alone
from monograph.distributed.file_ranges import read_range
from monograph.distributed.layer_bytes import Layout
from monograph.distributed.same_models import compare, digests
from monograph.recipe.run.agreement import Own, agree
from monograph.training import TrainStep
from monograph.upstream.torch_names import all_gathered
from support import shadow_device
from support.run_ranks import run_ranks

pytestmark = pytest.mark.slow


def steps(model, world, counts=(2, 4, 1)):
    """Losses of steps with fewer and more micro-batches than ranks, and the trained parameters as bytes."""
    step = TrainStep(model, mode="eager", world=world)
    host = torch.device("cpu")
    losses = []
    for number, count in enumerate(counts):
        result = step([training.batch(10 * number + k, host) for k in range(count)], 5e-3)
        losses.append(float(result.loss).hex())
    own = Own(3, float(result.loss), float(result.grad_norm), 0, 0, 1, 1, 1)
    return losses, step.state.flat.host.numpy().tobytes().hex(), agree(world, own).tokens


def stand_in(world):
    """On the device: one rank against three, and what they gather of a base."""
    shadow_device.install()
    group = shadow_device.stand_in_group(list(range(world.size)))
    ours = World(world.rank, world.size, world.rank, group)
    found = {"device": str(ours.device)}
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1), group=group)
    with shadow_device.shadow():
        where = torch.device("shadow")
        losses, flat, _ = steps(training.small_model(where), alone())
        got, other, tokens = steps(training.small_model(where), ours)
        found["ranks"] = (got == losses, other == flat, tokens)
        found["row"] = gathered(training.small_model(where), ours)
    return found


def gathered(model, world):
    """A unit's row from the shards of all ranks. (torch lets no ShardPlaceholder stand for a tensor of a
    Python device, so that `mg.shard` itself has no stand-in.)"""
    given = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    layout = Layout.of(given, world.size)
    shard = read_range(given, layout, world.rank)
    row = all_gathered(shard, world.size, world.group.group_name)
    compare("test", lambda: digests(iter(layout.views(row).items())), [world.group])
    same = all(torch.equal(view.host, given[name].host) for name, view in layout.views(row).items())
    return str(shard.device), str(row.device), same, len(given)


def test_collectives_are_given_tensors_of_the_device_alone():
    for found in run_ranks(3, "distributed/test_other_backend:stand_in"):
        assert found["device"] == "shadow"
        assert found["ranks"] == [True, True, 3]
        *row, tensors = found["row"]
        assert row == ["shadow:0", "shadow:0", True]
        assert tensors > 10
