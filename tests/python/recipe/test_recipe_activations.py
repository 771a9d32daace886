"""`tiled_mlp` of a recipe does what it says, or is refused by name."""

import os

import pytest
import torch._dynamo
from torch._dynamo.utils import counters

from monograph.recipe import ConfigError, check_keys
from monograph.recipe.run import train as train_module
from monograph.recipe.run.metrics import read_metrics
from monograph.training import TrainStep
from monograph.training.token_slices import sliced_mlps
from monograph.training.token_slices.sliced_mlp import MODES
from support.recipe_files import make_instruction_world, small_recipe


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_instruction_world(tmp_path_factory.mktemp("activations"))


def losses(root, name, **change):
    torch._dynamo.reset()
    counters.clear()
    keys = small_recipe(root, "instruction", output_dir=str(root / name), max_steps=3, lora_dropout=0.1)
    read = check_keys(keys | {"gradient_checkpointing": True} | change).recipe
    train_module.train(read)
    lines = read_metrics(os.path.join(read.output_dir, "metrics.jsonl"))
    with open(os.path.join(read.output_dir, "adapter_model.safetensors"), "rb") as file:
        adapter = file.read()
    return [(line["loss"], line["grad_norm"]) for line in lines], adapter


@pytest.mark.slow
def test_slices_change_no_bit(root, monkeypatch):
    made = []

    def step(*arguments, **given):
        made.append(TrainStep(*arguments, **given))
        return made[-1]

    monkeypatch.setattr(train_module, "TrainStep", step)
    want, adapter = losses(root, "plain")
    found, sliced = losses(root, "sliced", tiled_mlp=True, tiled_mlp_num_shards=3)
    assert counters["stats"]["unique_graphs"] == 1
    assert found == want
    assert sliced == adapter
    plain, cut = (one.model for one in made)
    assert not sliced_mlps(plain)
    assert {mlp.mlp_slices for mlp in sliced_mlps(cut)} == {3}
    made.clear()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"tiled_mlp_num_shards": 2}, "tiled_mlp is false, so it would do nothing; write tiled_mlp: true"),
        ({"tiled_mlp": True, "tiled_mlp_num_shards": 0}, "tiled_mlp_num_shards is 0, wanted 1 or more"),
        ({"tiled_mlp": True, "step_mode": "inductor"}, "tiled_mlp with step_mode: inductor"),
        ({"tiled_mlp": True, "step_mode": "per_layer"}, "tiled_mlp with step_mode: per_layer"),
        ({"tiled_mlp": True, "torch_compile": True}, "tiled_mlp with step_mode: inductor"),
        ({"tiled_mlp": True, "device": "cuda"}, "tiled_mlp with device: cuda"),
        ({"tiled_mlp": True, "shard_size": 2}, "tiled_mlp on a sharded base"),
        ({"tiled_mlp": True, "peft_use_dora": True}, "tiled_mlp with peft_use_dora"),
        ({"tiled_mlp": True, "trainer": "trl"}, "tiled_mlp"),
    ],
)
def test_what_is_refused(root, keys, said):
    with pytest.raises(ConfigError, match=said):
        check_keys(small_recipe(root, "instruction", **keys))


def test_the_modes_of_the_table_are_those_of_the_step():
    from monograph.recipe.config.activation_checks import SLICED_MODES

    assert SLICED_MODES == MODES
