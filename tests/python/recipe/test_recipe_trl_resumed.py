"""A run under TRL goes on from a checkpoint of its own alone."""

import shutil
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from monograph.recipe import check_keys
from monograph.recipe.config.keys import TRL_KEYS
from monograph.recipe.train import train
from monograph.recipe.trl.resumed_run import trl_identity
from support.trl_recipes import PROMPTS, run_recipe, sft_keys, write_rows
from support.trl_runs import make_folder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("tiny"), layers=1)


@pytest.fixture(autouse=True)
def no_compilation_left(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # the arguments write it; undone after the test


OTHER_RUNS = {
    "learning_rate": 0.01,
    "optimizer": "sgd",
    "lora_dropout": 0.5,
    "weight_decay": 0.5,
    "neftune_noise_alpha": 5.0,
}


def test_a_checkpoint_of_another_run_is_refused(folder, tmp_path):
    """Its tensors fit, and transformers goes on from it without a word."""
    events = {"save_strategy": None, "save_steps": 1}
    keys = sft_keys(folder, tmp_path, max_steps=1, **events)
    run_recipe(keys)
    again = keys | {"max_steps": 2, "resume_from_checkpoint": "auto"}
    for name, value in OTHER_RUNS.items():
        with pytest.raises(ValueError, match=f"resume_from_checkpoint: {name} is {value!r}"):
            train(check_keys(again | {name: value}).recipe)
    rows = {"path": write_rows(tmp_path / "other.jsonl", instruction=PROMPTS, output=PROMPTS)}
    with pytest.raises(ValueError, match="resume_from_checkpoint: files of datasets is"):
        train(check_keys(again | {"datasets": [again["datasets"][0] | rows]}).recipe)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    weights = load_file(other / "model.safetensors")
    for name in (name for name in weights if name.endswith("q_proj.weight")):
        weights[name] = weights[name] ^ 1  # other codes
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="checkpoint-1 was trained on the base with hash"):
        train(check_keys(again | {"base_model": str(other)}).recipe)
    train(check_keys(again).recipe)


def test_every_key_of_trl_is_compared_or_listed_as_free(folder, tmp_path):
    recipe = check_keys(sft_keys(folder, tmp_path)).recipe
    before = trl_identity(recipe)
    free = {name for name, row in TRL_KEYS.items() if row.resume.state == "free"}
    assert len(free) == 20
    for name in TRL_KEYS.keys() - free:
        assert trl_identity(replace(recipe, **{name: "x"})) != before, name
