"""Ranks whose parameters, rates, places or models differ: refused by name on every rank, not averaged."""

import pytest
import torch
from peft import LoraConfig

import monograph as mg
from monograph.distributed import World, alone
from monograph.distributed.replica_check import bits_of, check_alike, fingerprint, value_of
from monograph.training import TrainStep
from support.run_ranks import run_ranks
from support.tiny_models import tiny_llama


def llama(seed=0):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    model = tiny_llama(seed=seed, dtype=torch.bfloat16, **sizes)
    model.requires_grad_(False)
    torch.manual_seed(1)
    return mg.add_lora(model, LoraConfig(r=4, target_modules="all-linear"))


def batches(count=2):
    ids = torch.arange(32).reshape(2, 16)
    return [
        {"input_ids": ids + i, "labels": ids + i, "attention_mask": torch.ones_like(ids)}
        for i in range(count)
    ]


def refused(work):
    try:
        work()
    except ValueError as error:
        return str(error)
    return ""


def drifting(world):
    """What each way of drifting is answered with."""
    other = world.rank == 1
    told = {}

    def made():
        return TrainStep(llama(), mode="eager", world=world)

    step = made()
    step(batches(), 1e-2)
    told["alike"] = refused(lambda: step(batches(), 1e-2))
    if other:
        step.state.flat[0] += 1e-3
    told["parameters"] = refused(lambda: step(batches(), 1e-2))
    step = made()
    told["rate"] = refused(lambda: step(batches(), 2e-2 if other else 1e-2))
    kept = step.state_dict()
    step(batches(), 0.0)
    if other:
        step.load_state_dict(kept)
    told["place"] = refused(lambda: step(batches(), 1e-2))
    step = made()
    told["number"] = refused(lambda: step(batches(3 if other else 2), 1e-2))
    # As a DistributedSampler deals them: as many on each rank, but others.
    told["lists"] = refused(lambda: step(batches(4)[2 * world.rank :][:2], 1e-2))
    told["shards"] = refused(
        lambda: TrainStep(llama(), mode="eager", world=world, virtual_shards=1 + world.rank)(batches(), 1e-2)
    )
    told["base"] = refused(lambda: mg.shard(llama(seed=world.rank), world))
    told["same base"] = refused(lambda: mg.shard(llama(), world))
    return told


def test_ranks_that_differ_are_refused_on_all_of_them():
    for told in run_ranks(2, "distributed/test_ranks_drift:drifting"):
        assert told["alike"] == told["same base"] == ""
        assert told["parameters"].startswith(
            "the ranks have drifted apart: sum of the trained parameters (bits)"
        )
        assert told["rate"].startswith("the ranks have drifted apart: learning_rate (bits) is ")
        assert told["place"].startswith("the ranks have drifted apart: step is 1 on rank 0, 0 on rank 1")
        assert "number of micro-batches is 2 on rank 0, 3 on rank 1" in told["number"]
        assert told["lists"].startswith(
            "the ranks have drifted apart: micro-batch 0 (hash; every rank is given the same list of all) is "
        )
        assert "virtual_shards is 1 on rank 0, 2 on rank 1" in told["shards"]
        assert told["base"].startswith("shard: a sample of base_model.model.model.layers.0 is of SHA-256 ")


def test_numbers_that_sum_alike_are_told_apart():
    """2, 3 and 4 micro-batches are 9, as three times 3 are."""
    with pytest.raises(ValueError, match="number is 2 on rank 0, 3 on rank 1, 4 on rank 2; wanted the same"):
        check_alike("number", [2, 3, 4])
    assert value_of(bits_of(-0.1)) == -0.1
    assert bits_of(float("nan")) == bits_of(-float("nan"))


def test_a_fingerprint_sees_every_place():
    for size in (0, 1, 2, 7, 8):
        flat = torch.randn(size)
        assert fingerprint(flat) == fingerprint(flat.clone())
        for place in range(size):
            other = flat.clone()
            other[place] = torch.nextafter(other[place], torch.tensor(9.0))
            assert fingerprint(other) != fingerprint(flat)


def test_wrong_numbers_are_named():
    for wrong in (0, -1, 2.5, "3", True):
        with pytest.raises(ValueError, match=r"virtual_shards is .*, wanted a whole number, 1 or more"):
            TrainStep(llama(), mode="eager", virtual_shards=wrong)
    step = TrainStep(llama(), mode="eager", world=World())
    with pytest.raises(ValueError, match="a step of 4097 micro-batches, wanted 1 to 4096"):
        step(batches(1) * 4097, 1e-2)


def test_a_step_without_a_world_among_ranks_is_not_silent(monkeypatch, caplog):
    monkeypatch.setenv("WORLD_SIZE", "4")
    TrainStep(llama(), mode="eager")
    assert "WORLD_SIZE is 4 and TrainStep has no world: each rank trains an adapter of its own" in caplog.text
    caplog.clear()
    TrainStep(llama(), mode="eager", world=alone())
    monkeypatch.setenv("WORLD_SIZE", "1")
    TrainStep(llama(), mode="eager")
    assert "has no world" not in caplog.text


def test_a_change_on_one_rank_is_refused_on_all_of_them():
    """Its gradients would go into the update of all."""
    same = ["`add_adapter` of a second one, which stays off", "`merge_adapter()` and `unmerge_adapter()`"]
    refused = [
        "`layer.scaling[adapter]`, `layer.set_scale(...)`",
        "a second adapter that is on and frozen",
        "all but the adapters to bfloat16",
        "a frozen norm of a layer replaced",
        "the frozen head: other data, written in place",
        "dropout from 0.1 to 0.5, and to 0",
        '`set_attn_implementation("eager")`',
        "`norm.variance_epsilon`, in layers and outside",
        "`config.logits_scaling`",
    ]
    for told in run_ranks(2, "support/mesh_between_steps:on_one", [*same, *refused]):
        assert told == dict.fromkeys(same, "same bits") | dict.fromkeys(refused, "refused: ranks differ")
