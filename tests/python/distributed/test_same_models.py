"""Ranks whose models are not alike: refused by name, also between replicas and without sharding."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from torch.distributed.device_mesh import init_device_mesh

import monograph as mg
from monograph.nn import replace_linears
from monograph.training import TrainStep
from support.run_ranks import message, run_ranks
from support.tiny_models import tiny_llama

pytestmark = pytest.mark.slow


def build(seed=0, change=None, **config):
    model = tiny_llama(seed=seed, num_hidden_layers=1)
    replace_linears(model, "nf4", double_quant=True)
    torch.manual_seed(1)
    made = mg.add_lora(model, LoraConfig(**({"r": 4, "target_modules": ["q_proj", "down_proj"]} | config)))
    with torch.no_grad():
        if change is not None:
            change(made.get_base_model().model)
    return made


def one_byte(model):
    """Outside of what is compared as a sample, and nothing that a loss would show."""
    model.layers[0].mlp.down_proj.base_layer.values.view(-1)[0] ^= 1


def unlike(world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    second, last = world.rank > 1, world.rank == 3
    cases = {
        "alike": (mesh, {}),
        "other base": (mesh, {"seed": 77 if second else 0}),
        "one byte": (mesh, {"change": one_byte if second else None}),
        "alpha": (mesh, {"lora_alpha": 16 if last else 8}),
        "alpha, one replica": (world, {"lora_alpha": 16 if last else 8}),
        "rslora": (world, {"use_rslora": last}),
        "rank": (world, {"r": 2 if last else 4}),
        "dropout": (world, {"lora_dropout": 0.25 if last else 0.1}),
        "format": (world, {"target_modules": ["q_proj"] if last else ["q_proj", "down_proj"]}),
        "norm": (mesh, {"change": (lambda m: m.norm.weight.mul_(2)) if last else None}),
        "rotary": (mesh, {"change": (lambda m: m.rotary_emb.inv_freq.mul_(0.5)) if last else None}),
    }
    found = {
        name: message(lambda: mg.shard(build(**options), where))  # noqa: B023
        for name, (where, options) in cases.items()
    }
    for name in ("alike", "alpha, one replica", "dropout"):
        options = cases[name][1]
        found[f"step, {name}"] = message(
            lambda: TrainStep(build(**options), world=world, mode="eager")  # noqa: B023
        )
    return found


@pytest.fixture(scope="module")
def found():
    return run_ranks(4, "distributed/test_same_models:unlike")


LAYER = "base_model.model.model.layers.0"
CASES = {
    "other base": [f"shard: a sample of {LAYER} is of SHA-256", "on rank 0 and of SHA-256", "on rank 2"],
    "one byte": [f"shard: {LAYER}.shard is torch.uint8 [", "with SHA-256"],
    "alpha": [f"{LAYER}.self_attn.q_proj.lora_alpha is {{'default': 8}} on rank 0 and {{'default': 16}} on"],
    "alpha, one replica": ["lora_alpha is {'default': 8} on rank 0 and {'default': 16} on rank 3"],
    "rslora": ["q_proj.scaling is {'default': 2.0} on rank 0 and {'default': 4.0} on rank 3"],
    "rank": ["q_proj.r is {'default': 4} on rank 0 and {'default': 2} on rank 3"],
    "dropout": ["lora_dropout.default.p is 0.1 on rank 0 and 0.25 on rank 3"],
    "format": ["mlp.down_proj", "on rank 0 and missing on rank 3"],
    "norm": ["shard: base_model.model.model.norm.weight is torch.float32 [64] with SHA-256", "on rank 3"],
    "rotary": ["shard: base_model.model.model.rotary_emb.inv_freq is torch.float32 [", "on rank 3"],
    "step, alpha, one replica": ["adapters: ", "lora_alpha is {'default': 8} on rank 0 and {'default': 16}"],
    "step, dropout": ["adapters: ", "lora_dropout.default.p is 0.1 on rank 0 and 0.25 on rank 3"],
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_differ_are_refused_by_name(found, name):
    for rank, results in enumerate(found):
        text = results[name]
        assert text.startswith("ValueError: "), (rank, text)
        assert all(part in text for part in CASES[name]), (rank, text)
        assert text.endswith("wanted the same on all ranks"), (rank, text)


def test_ranks_that_are_alike_are_taken(found):
    for results in found:
        assert results["alike"] == results["step, alike"] == "no error", results
