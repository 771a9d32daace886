"""Which adapter a command takes, and on which base: the trained one, on the base that it was trained on."""

import json
import os
import shutil

import pytest
from safetensors.torch import load_file, save_file

from monograph.__main__ import main
from monograph.cli import native, serve
from monograph.cli.merge import native_arguments
from monograph.recipe import check_keys
from monograph.recipe.run.generate import Generator, find_adapter
from monograph.recipe.train import train
from support.recipe_files import make_instruction_world, make_model, make_tokenizer, small_recipe

SHORT = {"max_steps": 1, "step_mode": "eager"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A model, another of the same shape, and the adapter A that was trained on the first."""
    root = make_instruction_world(tmp_path_factory.mktemp("trained"))
    make_model(root / "other", seed=7)
    make_tokenizer(root / "other")
    train(recipe_of(root, "A"))
    return root


def recipe_of(root, out, **keys):
    return check_keys(small_recipe(root, "instruction", output_dir=str(root / out), **(SHORT | keys))).recipe


def test_the_adapter_that_a_run_began_from_is_not_what_it_made(root, monkeypatch):
    recipe = recipe_of(root, "B", lora_model_dir=str(root / "A"), serve_with="vllm")
    assert find_adapter(recipe) == str(root / "A")  # there is no other yet
    with pytest.raises(ValueError, match="there is no adapter in output_dir"):
        native_arguments(recipe)
    train(recipe)
    made = str(root / "B")
    assert find_adapter(recipe) == made
    arguments = native_arguments(recipe)
    assert arguments[arguments.index("--adapter") + 1] == made
    calls = []
    monkeypatch.setattr(native, "run_beside", lambda words: calls.append(words) or 0)
    assert serve.convert(recipe) == 0
    assert calls[0][3] == made
    first, second = (load_file(root / name / "adapter_model.safetensors") for name in "AB")
    assert any((first[name] != second[name]).any() for name in first)


def test_generate_says_that_nothing_was_trained_yet(root, tmp_path, capsys):
    path = tmp_path / "recipe.yml"
    keys = small_recipe(
        root, "instruction", output_dir=str(tmp_path / "none"), lora_model_dir=str(root / "A")
    )
    path.write_text(json.dumps(keys))
    assert main(["generate", str(path), "--prompt", "name", "--max-new-tokens", "1"]) == 0
    assert "has no adapter yet; that of lora_model_dir" in capsys.readouterr().err


def test_an_adapter_of_another_base_is_refused(root, tmp_path, capsys):
    other = str(root / "other")
    begun = recipe_of(root, "C", base_model=other, lora_model_dir=str(root / "A"))
    with pytest.raises(ValueError, match=r"was trained on the base with hash .*--another-base"):
        train(begun)
    recipe = recipe_of(root, "A", base_model=other)
    with pytest.raises(ValueError, match="was trained on the base with hash"):
        Generator(recipe, str(root / "A"))
    asked = ["generate", str(root / "A"), "--prompt", "name", "--max-new-tokens", "1", "--base-model", other]
    assert main(asked) == 3
    assert "was trained on the base with hash" in capsys.readouterr().err
    assert main([*asked, "--another-base"]) == 0
    train(recipe_of(root, "C", base_model=other, lora_model_dir=str(root / "A"), another_base=True))
    assert "another_base" not in (root / "C" / "recipe.yml").read_text()


def test_trl_compares_the_base_too(root):
    keys = {"base_model": str(root / "other"), "lora_model_dir": str(root / "A"), "trainer": "trl"}
    keys |= {"step_mode": None, "sample_packing": False}
    with pytest.raises(ValueError, match="was trained on the base with hash"):
        train(recipe_of(root, "T", **keys))


def test_the_same_base_elsewhere_and_the_same_packed_values_are_the_base(root, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(root / "model", moved)
    Generator(recipe_of(root, "A", base_model=str(moved)), str(root / "A"))
    # Another file of the same packed values: one tensor that is not packed has changed its dtype.
    weights = load_file(moved / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].float()
    save_file(weights, moved / "model.safetensors", {"format": "pt"})
    Generator(recipe_of(root, "A", base_model=str(moved)), str(root / "A"))


def test_the_record_of_a_finished_adapter_stays_its_own(root, tmp_path):
    """A run over a finished one that ends early leaves adapter and record of the same base."""
    out = tmp_path / "out"
    shutil.copytree(root / "A", out)
    before = json.loads((out / "monograph.json").read_text())["base"]["sha256"]
    recipe = recipe_of(
        root, out, base_model=str(root / "other"), max_steps=2, max_bad_steps=1, learning_rate=0.1
    )
    from monograph.recipe.run.train import Run

    def broken(self, *_):
        raise ValueError("stopped here")

    step, Run._one_step = Run._one_step, broken
    try:
        with pytest.raises(ValueError, match="stopped here"):
            train(recipe)
    finally:
        Run._one_step = step
    assert json.loads((out / "monograph.json").read_text())["base"]["sha256"] == before
    train(recipe)
    assert json.loads((out / "monograph.json").read_text())["base"]["sha256"] != before
    assert os.path.isfile(out / "checkpoint-2" / "monograph.json")
