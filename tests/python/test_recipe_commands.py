"""`python -m monograph`: commands, messages and exit codes."""

import json

import pytest

from monograph.__main__ import main
from recipe_files import make_tokenizer, write_jsonl


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe file for a tokenizer and two rows."""
    root = tmp_path_factory.mktemp("recipe")
    make_tokenizer(root / "model")
    (root / "model" / "config.json").write_text("{}")
    rows = [{"instruction": "name?", "output": name} for name in ("Ada", "the fox")]
    keys = {
        "base_model": str(root / "model"),
        "adapter": "qlora",
        "lora_target_linear": True,
        "datasets": [{"path": write_jsonl(root / "train.jsonl", rows), "type": "instruction"}],
        "dataset_prepared_path": str(root / "prepared"),
        "tf32": True,
    }
    (root / "recipe.yml").write_text(json.dumps(keys))
    return str(root / "recipe.yml")


def test_without_a_command_the_commands_are_listed(capsys):
    assert main([]) == 2
    assert "python -m monograph preprocess" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "Exit codes" in capsys.readouterr().out
    assert main(["trian"]) == 2
    assert "'trian' is no command, wanted example, preprocess, train" in capsys.readouterr().err


def test_preprocess_prepares_shows_and_counts(recipe, capsys):
    assert main(["preprocess", recipe, "--debug", "--debug-num-examples", "1"]) == 0
    captured = capsys.readouterr()
    assert "note: tf32: ignored; it is a mode of NVIDIA GPUs" in captured.err
    assert "document 0:" in captured.out
    assert "document 1:" not in captured.out
    assert captured.out.splitlines()[-1].startswith("prepared in ")


def test_a_wrong_recipe_is_2_and_wrong_data_3(recipe, capsys):
    assert main(["preprocess", recipe, "--lora-rank", "4"]) == 2
    assert "lora_rank: unknown key; here it is called lora_r" in capsys.readouterr().err
    assert main(["preprocess", recipe, "--datasets.0.type", "completion"]) == 3
    assert "row 0: column 'text' is missing" in capsys.readouterr().err
