"""recipes/*.yml: the commands of each page run on a tiny model of that class; estimates are counted."""

import contextlib
import io
import json
import re
import shlex
import sys

import pytest
import torch
import yaml

from monograph.__main__ import main
from monograph.cli import native
from monograph.recipe.run.metrics import read_metrics
from support.hub_models import FIRST, MODELS, make_tiny
from support.native_tool import ROOT, run
from support.recipe_files import write_jsonl

sys.path.insert(0, str(ROOT / "tools"))

import update_recipe_pages

pytestmark = pytest.mark.slow
# A tiny model and few tokens in place of what the recipe names; all other keys are as printed.
SHORTER = {
    "train": "--base-model model --max-steps 3 --gradient-accumulation-steps 1 --learning-rate 0.02 "
    "--sequence-len {length} --lr-scheduler constant",
    "preprocess": "--base-model model --sequence-len {length}",
    "generate": "--max-new-tokens 2",
    "merge": "",
}


def commands(recipe):
    page = (ROOT / "docs" / "recipes" / f"{recipe}.md").read_text()
    return re.findall(r"^python -m monograph (\w+) (.*)$", page, re.MULTILINE)


def test_there_is_a_page_and_a_model_for_every_recipe():
    names = sorted(path.stem for path in (ROOT / "recipes").glob("*.yml"))
    assert sorted(FIRST) == names
    assert sorted(path.stem for path in (ROOT / "docs" / "recipes").glob("*.md")) == sorted([*names, "index"])


@pytest.mark.parametrize("recipe", FIRST)
def test_a_recipe_names_the_model_that_is_counted(recipe):
    keys = yaml.safe_load((ROOT / "recipes" / f"{recipe}.yml").read_text())
    assert keys["base_model"] == FIRST[recipe].hub
    assert keys["output_dir"] == f"outputs/{recipe}"
    assert keys["sequence_len"] == update_recipe_pages.TOKENS
    assert keys["lora_r"] == update_recipe_pages.RANK


@pytest.mark.parametrize("recipe", FIRST)
def test_the_commands_of_a_page_run(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(native, "exec_native", lambda arguments: run(*arguments).returncode)
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    make_tiny(FIRST[recipe], tmp_path / "model")
    chats = [
        [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"{n} dog {n % 7}"}]
        for n in range(40)
    ]
    write_jsonl(tmp_path / "train.jsonl", [{"messages": chat} for chat in chats])
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    length = 320 if recipe == "gpt_oss" else 128  # harmony's system message is long
    found = commands(recipe)
    assert [command for command, _ in found] == ["preprocess", "train", "generate", "merge"]
    for command, rest in found:
        said = io.StringIO()
        words = [command, *shlex.split(rest), *SHORTER[command].format(length=length).split()]
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            assert main(words) in (0, None), f"{words}\n{said.getvalue()}"
    losses = [
        line["loss"] for line in read_metrics(tmp_path / f"outputs/{recipe}/metrics.jsonl") if "loss" in line
    ]
    assert losses[-1] < losses[0]
    written = json.loads((tmp_path / f"outputs/{recipe}/adapter_config.json").read_text())
    assert written["r"] == 16
    assert list((tmp_path / f"outputs/{recipe}-merged").glob("*.safetensors"))


@pytest.mark.parametrize("model", MODELS, ids=[model.hub for model in MODELS])
def test_the_table_of_a_page_is_counted(model):
    """All but activations, which the tool measures: minutes for a large model."""
    page = (ROOT / "docs" / "recipes" / f"{model.recipe}.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith(f"| `{model.hub}`"))
    found = [cell.strip() for cell in row.strip("|").split("|")]
    want = update_recipe_pages.cells(model, float(found[3]))
    assert found == want
