"""`gradient_checkpointing: offload` and `offload_disk` of a recipe mean it."""

import os

import pytest
import torch._dynamo
from torch._dynamo.utils import counters

from monograph.recipe import ConfigError, check_keys
from monograph.recipe.config.placement import offload_place
from monograph.recipe.run import train as train_module
from monograph.recipe.run.metrics import read_metrics
from monograph.training import TrainStep
from support.recipe_files import make_instruction_world, small_recipe


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_instruction_world(tmp_path_factory.mktemp("offload"))


def losses(root, name, **change):
    keys = small_recipe(root, "instruction", output_dir=str(root / name), max_steps=3)
    read = check_keys(keys | change).recipe
    train_module.train(read)
    lines = read_metrics(os.path.join(read.output_dir, "metrics.jsonl"))
    return [(line["loss"], line["grad_norm"]) for line in lines]


def test_the_same_bits_from_a_file_in_one_graph(root, monkeypatch):
    made = []

    def step(*arguments, **given):
        given["offload_min_bytes"] = 0
        made.append(TrainStep(*arguments, **given))
        return made[-1]

    monkeypatch.setattr(train_module, "TrainStep", step)
    want = losses(root, "plain", gradient_checkpointing=True)
    torch._dynamo.reset()
    counters.clear()
    scratch = root / "scratch"
    scratch.mkdir()
    found = losses(root, "disk", gradient_checkpointing="offload_disk", offload_folder=str(scratch))
    assert found == want
    assert counters["stats"]["unique_graphs"] == 1
    plain, disk = made
    assert plain.offload is None
    counts = disk.offload.counts()
    assert counts.writes == counts.reads >= 3 * disk.model.config.num_hidden_layers
    assert counts.bytes_written == counts.bytes_read > 0
    assert len(list(scratch.iterdir())) == 1
    made.clear()
    del plain, disk
    torch._dynamo.reset()


def test_offload_on_a_cpu_says_that_it_means_a_disk(root):
    checked = check_keys(small_recipe(root, "instruction", gradient_checkpointing="offload"))
    assert checked.recipe.offloads
    assert any("are in host memory (cpu) already, so it means offload_disk" in n for n in checked.notices)
    checked = check_keys(small_recipe(root, "instruction", gradient_checkpointing="unsloth"))
    assert not checked.recipe.offloads
    device = small_recipe(root, "instruction", gradient_checkpointing="offload", device="cuda")
    assert offload_place(check_keys(device).recipe) == "host"
    assert any("unsloth is plain recomputation here" in n for n in checked.notices)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"offload_folder": "/tmp", "gradient_checkpointing": True}, "offload_folder: no file is written"),
        (
            {"gradient_checkpointing": "offload_disk", "step_mode": "whole_step"},
            "a whole step has no border between forward and backward; write step_mode: graph or inductor",
        ),
        (
            {"gradient_checkpointing": "offload_disk", "device": "cuda"},
            "the graph of another device offloads to host memory only",
        ),
    ],
)
def test_what_would_do_nothing_is_refused(keys, said, root):
    with pytest.raises(ConfigError, match=said):
        check_keys(small_recipe(root, "instruction", **keys))


def test_a_recipe_under_trl_offloads_by_hooks(tmp_path, monkeypatch):
    from monograph.memory.offload import offload_activations
    from monograph.recipe.trl import run
    from support.trl_recipes import ANSWERS, PROMPTS, columns, run_recipe, trl_keys, write_rows
    from support.trl_runs import make_folder

    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    folder, contexts, found = make_folder(tmp_path / "tiny", layers=1), [], []

    def whole(*arguments, **given):
        # TRL saves a number of 8 bytes whose backward never runs.
        contexts.append(offload_activations(*arguments, **given, min_bytes=64))
        return contexts[-1]

    monkeypatch.setattr(run, "offload_activations", whole)
    for checkpointing in (True, "offload_disk"):
        root = tmp_path / str(checkpointing)
        root.mkdir()
        path = write_rows(root / "sft.jsonl", instruction=PROMPTS, output=ANSWERS)
        kind = {"no_input_format": "{instruction} "}
        keys = trl_keys(
            folder, root, path, kind, trainer="trl", max_steps=2, gradient_checkpointing=checkpointing
        )
        found.append(columns(run_recipe(keys), "loss", "grad_norm"))
    assert found[0] == found[1]
    assert len(contexts) == 1
    counts = contexts[0].counts()
    assert counts.writes == counts.reads >= 2
    assert counts.alive == 0
