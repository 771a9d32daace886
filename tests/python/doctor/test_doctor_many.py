"""doctor of a recipe with several adapters: one retires, another joins, and nothing is compiled."""

import json

import pytest
import yaml

from monograph.__main__ import main
from monograph.many.adapter_run import AdapterRun
from support.recipe_files import make_instruction_world, small_recipe

pytestmark = pytest.mark.slow
ADAPTERS = [{"name": "law", "lora_r": 8, "lora_dropout": 0.1}, {"name": "med", "lora_r": 12, "seed": 7}]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    world = make_instruction_world(tmp_path_factory.mktemp("doctor"))
    path = world / "r.yml"
    path.write_text(yaml.safe_dump(small_recipe(world, "instruction", adapters=ADAPTERS, sequence_len=48)))
    return str(path)


@pytest.mark.parametrize("keys", [[], ["--step-mode", "whole_step", "--gradient-checkpointing", "true"]])
def test_nothing_is_compiled_when_one_retires_and_another_joins(recipe, keys, capsys):
    assert main(["doctor", recipe, "--json", "--quiet", *keys]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["adapters"] == ["law", "med"]
    assert found["graphs"] == 2
    assert (found["recompiles"], found["later_graphs"], found["later_traces"]) == ([], 0, 0)
    assert found["holds"] is True


def test_what_is_compiled_is_told(recipe, capsys, monkeypatch):
    """Without kinds no adapter finds a slot: the one that joins has a graph of its own."""
    monkeypatch.setattr(AdapterRun, "kind", lambda run: str(id(run)))
    assert main(["doctor", recipe, "--quiet"]) == 1
    said = capsys.readouterr().out
    assert "later           1 graphs, " in said
    assert "The promise does not hold" in said
