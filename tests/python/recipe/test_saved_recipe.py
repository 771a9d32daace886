"""The folder of an adapter remembers its recipe; README's two lines, word by word."""

import json
import os
import pathlib
import re
import shlex
import shutil

import pytest

from monograph.__main__ import main
from monograph.recipe import check_keys, read_config
from monograph.recipe.config.keys import Recipe
from monograph.recipe.run.saved_recipe import write_recipe
from support.recipe_files import make_model, make_tokenizer, write_jsonl

ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture(scope="module")
def lines():
    """The commands under "With axolotl's YAML" of the README."""
    section = (ROOT / "README.md").read_text().split("## With axolotl's YAML")[1]
    block = re.search(r"```\n(.*?)```", section, re.DOTALL)[1]
    return [shlex.split(line) for line in block.splitlines()]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """What the README's reader has: examples/, a model my-llama, and train.jsonl."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", "examples")
    make_tokenizer("my-llama")
    make_model("my-llama", num_hidden_layers=1)
    rows = [{"instruction": f"What is {n}?", "input": "", "output": f"{n} dog"} for n in range(40)]
    write_jsonl(tmp_path / "train.jsonl", rows)
    return tmp_path


def test_the_two_lines_of_the_readme(lines, place, capsys, monkeypatch):
    assert [line[:3] for line in lines] == [["python", "-m", "monograph"]] * 2
    train, generate = (line[3:] for line in lines)
    assert main(train) == 0
    said = capsys.readouterr()
    assert generate[1] in said.err  # "adapter in outputs/qlora": the folder that the second line names
    assert main([*generate, "--max-new-tokens", "4"]) == 0
    answer = capsys.readouterr().out
    # The answer is that of the recipe with the overrides of the first line.
    same = ["generate", train[1], *train[2:], *generate[2:], "--max-new-tokens", "4"]
    assert main(same) == 0
    assert capsys.readouterr().out == answer
    # The file alone does not know the base; it says where it is known.
    assert main(["generate", train[1], *generate[2:]]) == 2
    assert (
        "holds an adapter with its own recipe: write ./outputs/qlora for this file" in capsys.readouterr().err
    )
    # From anywhere, and from a checkpoint.
    (place / "elsewhere").mkdir()
    monkeypatch.chdir(place / "elsewhere")
    for folder in (f"../{generate[1]}", "../outputs/qlora/checkpoint-3", "../outputs/qlora/checkpoint-3/"):
        assert main(["generate", folder, "--prompt", "What is 7?", "--max-new-tokens", "4"]) == 0
        assert capsys.readouterr().out.count("\n") >= 1


def test_every_key_comes_back_as_it_was(place):
    template = "{% for m in messages %}{{ m.content }}é{% endfor %}"
    (place / "chat.jinja").write_text(template)
    (place / "adapter").mkdir()
    (place / "adapter" / "adapter_config.json").write_text("{}")
    keys = {
        "base_model": "my-llama",
        "adapter": "qlora",
        "lora_model_dir": "adapter",
        "lora_target_modules": ["q_proj", "v_proj"],
        "lora_rank_pattern": {"q_proj": 4},
        "datasets": [{"path": "train.jsonl", "type": {"format": "{instruction}: "}, "split": "train"}],
        "chat_template": "jinja",
        "chat_template_jinja": "chat.jinja",
        "chat_template_kwargs": {"enable_thinking": False},
        "learning_rate": 1e-5,
        "sample_packing": True,
        "val_set_size": 0.1,
        "output_dir": "out",
        "resume_from_checkpoint": "auto",
    }
    before = check_keys(keys).recipe
    os.mkdir("out")
    write_recipe(before, "out")
    after = read_config("out").recipe
    here = str(place)
    changed = {name: value for name, value in vars(after).items() if value != vars(before)[name]}
    assert changed.pop("datasets")[0].path == f"{here}/train.jsonl"
    assert changed == {
        "base_model": f"{here}/my-llama",
        "lora_model_dir": f"{here}/adapter",
        "chat_template_jinja": template,
        "resume_from_checkpoint": None,
    }
    assert read_config("out", ["--output-dir", "new"]).recipe.output_dir == "new"


def test_only_what_was_written_is_kept(tmp_path):
    write_recipe(Recipe(base_model="nobody/nothing", adapter="qlora"), str(tmp_path))
    lines = (tmp_path / "recipe.yml").read_text().splitlines()
    assert lines[1:] == ["base_model: nobody/nothing", "adapter: qlora"]


def test_training_goes_on_from_the_folder_alone(place, capsys):
    arguments = ["--base-model", "my-llama", "--datasets.0.path", "train.jsonl", "--sequence-len", "128"]
    arguments += ["--max-steps", "2", "--save-steps", "1", "--saves-per-epoch", "null"]
    assert main(["train", "examples/qlora.yml", *arguments]) == 0
    os.rename("outputs/qlora", "moved")
    assert main(["train", "moved", "--resume-from-checkpoint", "auto", "--max-steps", "3"]) == 0
    assert "max_steps is 3 from here on, was 2" in capsys.readouterr().err
    with open("moved/checkpoint-3/trainer_state.json") as file:
        assert json.load(file)["step"] == 3
    assert not os.path.exists("outputs/qlora")
