"""Recipes under TRL: the losses of a plain script of TRL's, graphs, files, resuming."""

import json
import os
from dataclasses import replace

import pytest
import torch
import torch._dynamo
import yaml
from torch._dynamo.utils import counters

from monograph.__main__ import main
from monograph.recipe import check_keys, read_config
from monograph.recipe.train import train
from support.trl_recipes import (
    ANSWERS,
    PROMPTS,
    columns,
    counted_graphs,
    run_recipe,
    run_script,
    sft_keys,
)
from support.trl_runs import make_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("tiny"), layers=1)


@pytest.fixture(autouse=True)
def no_compilation_left(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # the arguments write it; undone after the test


@pytest.fixture(scope="module")
def eager(folder, tmp_path_factory):
    """Twelve steps in eager mode."""
    return run_recipe(sft_keys(folder, tmp_path_factory.mktemp("eager")))


def test_sft_has_the_losses_of_the_script_and_learns(folder, tmp_path, eager):
    """The recipe tokenises and masks by itself, the script leaves both to TRL."""
    rows = {"prompt": [text + " " for text in PROMPTS], "completion": ANSWERS}
    script = run_script("sft", folder, tmp_path, rows)
    assert columns(eager, "loss", "grad_norm") == columns(script, "loss", "grad_norm")
    assert len(eager) == 12
    assert eager[-1]["loss"] < 0.5 * eager[0]["loss"]


@pytest.mark.parametrize(
    "compiling",
    [{"torch_compile": True, "torch_compile_backend": "eager"}, {"step_mode": "graph"}],
    ids=["torch_compile", "regions"],
)
def test_sft_is_one_graph_with_the_bits_of_eager_mode(compiling, folder, tmp_path, eager):
    keys = sft_keys(folder, tmp_path, max_steps=2, **compiling)
    with counted_graphs(counters, torch._dynamo) as found:
        compiled = run_recipe(keys)
    assert found == {"graphs": 1, "breaks": 0}
    assert columns(compiled, "loss", "grad_norm") == columns(eager[:2], "loss", "grad_norm")


def test_a_metric_that_no_evaluation_gives_is_named(folder, tmp_path, capsys):
    asked = {"metric_for_best_model": "foo", "load_best_model_at_end": True, "val_set_size": 4}
    keys = sft_keys(folder, tmp_path, max_steps=1, eval_steps=1, save_steps=1, **asked)
    keys.pop("save_strategy")
    path = tmp_path / "recipe.yml"
    path.write_text(yaml.safe_dump(keys))
    assert main(["train", str(path)]) == 2
    said = capsys.readouterr().err
    assert "recipe: metric_for_best_model is foo, wanted one of eval_" in said
    assert "eval_loss" in said


def test_packed_rows_train(folder, tmp_path):
    keys = sft_keys(folder, tmp_path, sample_packing=True, micro_batch_size=2, max_steps=4, sequence_len=32)
    lines = run_recipe(keys)
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_a_stopped_run_goes_on_with_the_bits_of_an_unbroken_one(folder, tmp_path):
    events = {"save_strategy": None, "save_steps": 2, "lr_scheduler": "linear", "lora_dropout": 0.25}
    keys = sft_keys(folder, tmp_path, max_steps=4, **events)
    whole = run_recipe(keys)
    out = tmp_path / "out"
    assert {"recipe.yml", "monograph.json", "optimizer.pt"} <= set(os.listdir(out / "checkpoint-2"))
    assert {"recipe.yml", "metrics.jsonl", "loss.png", "adapter_config.json"} <= set(os.listdir(out))
    again = run_recipe(keys | {"resume_from_checkpoint": str(out / "checkpoint-2")})
    assert columns(again, "loss", "grad_norm") == columns(whole, "loss", "grad_norm")
    remembered = read_config(str(out)).recipe
    assert remembered == replace(check_keys(keys).recipe, resume_from_checkpoint=None)


def test_a_checkpoint_of_the_other_engine_is_refused(folder, tmp_path):
    checkpoint = tmp_path / "out" / "checkpoint-1"
    checkpoint.mkdir(parents=True)
    for name in ("trainer_state.json", "optimizer.safetensors"):
        (checkpoint / name).write_text("{}")
    keys = sft_keys(folder, tmp_path, resume_from_checkpoint="auto")
    with pytest.raises(
        ValueError, match=r"checkpoint-1 has no optimizer\.pt; wanted one of a run with trainer"
    ):
        train(check_keys(keys).recipe)


def test_doctor_looks_at_the_step_of_the_trainer(folder, tmp_path, capsys):
    recipe = tmp_path / "recipe.yml"
    # Three rows: 48 tokens, the size of no weight.
    recipe.write_text(yaml.safe_dump(sft_keys(folder, tmp_path, micro_batch_size=3)))
    assert main(["doctor", str(recipe), "--json", "--quiet"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["graphs"], report["breaks"], report["recompiles"]) == (1, [], [])
    assert not (tmp_path / "out").exists()
