"""A recipe on two ranks: with `shard_size: 2` the adapter, the losses and the records of whole ranks."""

from __future__ import annotations

import hashlib
import json
import pathlib

import pytest
import yaml

from monograph.__main__ import main
from monograph.recipe import check_keys
from support.native_tool import run
from support.recipe_files import make_instruction_world, small_recipe
from support.run_ranks import run_ranks

WAYS = {"whole": {}, "cut": {"shard_size": 2}}


def recipe_of(root, name):
    changes = {
        "output_dir": str(root / name),
        "gradient_accumulation_steps": 3,
        "max_steps": 3,
        "lora_dropout": 0.1,
        "val_set_size": 8,
        "eval_steps": 2,
        "save_steps": 2,
        "gradient_checkpointing": True,
        "calibration": 2,
    }
    return small_recipe(root, "instruction", **changes) | WAYS[name]


def trained(world, root):
    from monograph.recipe.train import train

    for name in WAYS:
        train(check_keys(recipe_of(pathlib.Path(root), name)).recipe, world)
    return "done"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    made = make_instruction_world(tmp_path_factory.mktemp("sharded"))
    run_ranks(2, "recipe/test_recipe_sharded:trained", str(made))
    return made


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name].hex() for line in lines for name in ("loss", "eval_loss", "grad_norm") if name in line]


def test_the_adapter_and_the_losses_are_those_of_whole_ranks(root):
    whole, other = root / "whole", root / "cut"
    assert len(losses(whole)) >= 7
    assert losses(other) == losses(whole)
    assert sha256(other / "adapter_model.safetensors") == sha256(whole / "adapter_model.safetensors")
    sketches = "calibration.safetensors"
    assert sha256(other / sketches) == sha256(whole / sketches)
    for name in ("base", "schema_version"):
        records = [json.loads((folder / "monograph.json").read_text())[name] for folder in (whole, other)]
        assert records[0] == records[1]
    checkpoints = [sorted(path.name for path in folder.glob("checkpoint-*")) for folder in (whole, other)]
    assert checkpoints[0] == checkpoints[1] != []


def test_generate_and_merge_after_sharded_training(root, capsys):
    """They load folders: nothing of the ranks is left in them."""
    answers = []
    for name in ("whole", "cut"):
        (root / f"{name}.yml").write_text(yaml.safe_dump(recipe_of(root, name)))
        asked = ["--prompt", "What is 3?", "--max-new-tokens", "5"]
        assert main(["generate", str(root / f"{name}.yml"), *asked]) == 0
        answers.append(capsys.readouterr().out)
        run("merge", root / "model", "--adapter", root / name, "--out", root / f"{name}-merged")
    assert answers[0] == answers[1]
    merged = [sha256(root / f"{name}-merged" / "model.safetensors") for name in ("whole", "cut")]
    assert merged[0] == merged[1]
