"""README.md of an adapter says what it is: base and hash, data, recipe, losses, how to use it."""

import json
import re

import pytest
import torch
import yaml
from peft import PeftModel

from monograph.recipe import check_keys
from monograph.recipe.run.metrics import read_metrics
from monograph.recipe.train import train
from support.recipe_files import make_instruction_world, small_recipe


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_instruction_world(tmp_path_factory.mktemp("card"))


ENGINES = {"own": {"step_mode": "eager"}, "trl": {"trainer": "trl", "sample_packing": False}}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_card_holds_what_the_run_knows(root, tmp_path, engine):
    keys = {
        "output_dir": str(tmp_path / "out"),
        "max_steps": 3,
        "val_set_size": 4,
        "eval_steps": 2,
        "save_steps": 2,
    }
    train(check_keys(small_recipe(root, "instruction", **(keys | ENGINES[engine]))).recipe)
    for folder, last in ((tmp_path / "out", 3), (tmp_path / "out" / "checkpoint-2", 2)):
        card = (folder / "README.md").read_text()
        assert "[More Information Needed]" not in card
        front = yaml.safe_load(card.split("---\n")[1])
        assert front["library_name"] == "peft"
        assert "base_model" not in front  # a folder of this machine is no name on the Hub
        record = json.loads((folder / "monograph.json").read_text())["base"]
        assert record["sha256"] in card
        assert "nf4, blocks of 64, double quantisation" in card
        assert "| `train.jsonl` | instruction |" in card
        assert f"| steps | {last} |" in card
        losses = [line["loss"] for line in read_metrics(tmp_path / "out" / "metrics.jsonl") if "loss" in line]
        assert f"{losses[0]:.4f} at step 1, {losses[last - 1]:.4f} at step {last}" in card
        assert "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in card
    assert "loss on held back data" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("adapter", ["qlora", "lora"])
def test_its_lines_of_python_load_the_adapter(root, tmp_path, adapter):
    out = str(tmp_path / "out")
    keys = {"output_dir": out, "max_steps": 1, "step_mode": "eager", "adapter": adapter}
    train(check_keys(small_recipe(root, "instruction", **keys)).recipe)
    code = re.search(r"```python\n(.*?)```", (tmp_path / "out" / "README.md").read_text(), re.DOTALL)[1]
    names = {"BASE": str(root / "model"), "ADAPTER": out}
    exec(code, names)
    assert isinstance(names["model"], PeftModel)
    with torch.no_grad():
        assert names["model"](input_ids=torch.tensor([[5, 6, 7]])).logits.isfinite().all()
