"""A recipe in every step mode: the graphs that the mode promises, no break, and the losses of eager."""

import functools
import os

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from monograph.recipe import ConfigError, check_keys
from monograph.recipe.run import train as train_module
from monograph.recipe.run.metrics import read_metrics
from monograph.training import MODES, TrainStep
from support.recipe_files import make_instruction_world, small_recipe

pytestmark = pytest.mark.slow
# per_layer has two: the input of the first layer needs no gradient.
GRAPHS = {"graph": 1, "whole_step": 1, "inductor": 1, "inductor_whole_step": 1, "per_layer": 2}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_instruction_world(tmp_path_factory.mktemp("modes"))


def losses(root, name, **change):
    """The losses and gradient norms of four steps."""
    keys = small_recipe(root, "instruction", output_dir=str(root / name), lora_dropout=0.05, max_steps=4)
    read = check_keys(keys | {"gradient_checkpointing": True} | change).recipe
    train_module.train(read)
    return [
        (line["loss"], line["grad_norm"])
        for line in read_metrics(os.path.join(read.output_dir, "metrics.jsonl"))
    ]


@pytest.fixture(scope="module")
def eager(root):
    return losses(root, "eager", torch_compile=False)


LONG = {"inductor_whole_step": pytest.mark.long}


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=LONG.get(mode, ())) for mode in GRAPHS])
def test_every_mode_trains_without_a_break_to_the_losses_of_eager(mode, root, eager, monkeypatch, capsys):
    """aot_eager runs eager mode's operators in their order: same bits. fullgraph=True lets no break pass."""
    monkeypatch.setattr(train_module, "TrainStep", functools.partial(TrainStep, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    assert losses(root, mode, step_mode=mode) == eager
    assert f"mode {mode}" in capsys.readouterr().err
    assert counters["stats"]["unique_graphs"] == GRAPHS[mode]
    assert not counters["graph_break"]
    torch._dynamo.reset()


def test_every_mode_of_the_step_can_be_written(root):
    assert set(GRAPHS) | {"eager"} == set(MODES)
    for mode in MODES:
        assert check_keys(small_recipe(root, "instruction", step_mode=mode)).recipe.mode == mode


@pytest.mark.parametrize(
    ("written", "mode"),
    [
        ({}, "graph"),
        ({"torch_compile": "auto"}, "graph"),
        ({"torch_compile": False}, "eager"),
        ({"torch_compile": True}, "inductor"),
        ({"torch_compile": True, "step_mode": "whole_step"}, "inductor_whole_step"),
        ({"torch_compile": "auto", "torch_compile_mode": "default"}, "inductor"),
        ({"torch_compile": "auto", "torch_compile_options": {"epilogue_fusion": True}}, "inductor"),
    ],
)
def test_axolotls_keys_choose_inductor(written, mode, root):
    assert check_keys(small_recipe(root, "instruction", **written)).recipe.mode == mode


def test_without_a_compiler_only_generated_code_is_refused(root, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    assert check_keys(small_recipe(root, "instruction")).recipe.mode == "graph"
    for asks in ({"torch_compile": True}, {"step_mode": "per_layer"}):
        with pytest.raises(ConfigError, match=r"generates code, and no C\+\+ compiler is found"):
            check_keys(small_recipe(root, "instruction", **asks))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_mode": "fast"}, "step_mode is 'fast'"),
        (
            {"step_mode": "graph", "torch_compile": True},
            "step_mode is graph, which generates no code, and torch_compile: true asks for Inductor's",
        ),
        (
            {"step_mode": "per_layer", "torch_compile": False},
            "step_mode is per_layer and torch_compile false",
        ),
    ],
)
def test_a_mode_that_would_not_be_taken_is_refused(change, message, root):
    with pytest.raises(ConfigError, match=message):
        check_keys(small_recipe(root, "instruction", **change))
