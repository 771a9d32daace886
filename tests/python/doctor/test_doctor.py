"""doctor: finds nothing wrong in our step, and finds what is wrong elsewhere, with its line."""

import json

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from torch import nn

import monograph as mg
from monograph.__main__ import main
from monograph.nn import replace_linears
from support.recipe_files import make_model, make_tokenizer, small_recipe, write_jsonl
from support.step_models import batches, build

pytestmark = pytest.mark.slow


def test_our_step_holds_and_saves_no_weight():
    model = build("llama", checkpointing=True)
    report = mg.doctor(model, batches(True, 3)[:2])
    assert report.holds, str(report)
    assert report.graphs == 1
    assert report.weight_copies == []
    assert sum(size for kind, size in report.saved_bytes.items() if "packed" in kind) > 0
    assert json.loads(report.to_json())["holds"] is True
    assert "The step is one graph." in str(report)


class Chatty(nn.Module):
    """Breaks the graph on purpose and depends on a number that changes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.calls = 0

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        self.calls += 1
        return self.second(x)


def square(model, batch):
    return model(batch["x"]).pow(2).sum()


def test_a_break_is_reported_with_its_line():
    model = get_peft_model(Chatty(), LoraConfig(target_modules=["first", "second"]))
    report = mg.doctor(model, [{"x": torch.randn(3, 64)}, {"x": torch.randn(5, 64)}], loss=square)
    assert not report.holds
    assert report.graphs > 1
    assert any("test_doctor.py" in cause.where for cause in report.breaks), report.breaks
    assert "graph breaks" in str(report)


def test_a_recompile_is_reported_with_its_cause():
    class Counting(Chatty):
        def forward(self, x):
            self.calls += 1
            return self.second(self.first(x)) * (1 if self.calls < 2 else 2)

    model = get_peft_model(Counting(), LoraConfig(target_modules=["first", "second"]))
    report = mg.doctor(model, [{"x": torch.randn(3, 64)}] * 3, loss=square)
    assert report.recompiles, str(report)
    assert any("calls" in cause.reason for cause in report.recompiles), report.recompiles


def test_a_dequantised_weight_kept_for_backward_is_an_error():
    """A layer that expands its weight in the graph: what the operators exist to avoid."""

    class Expanding(nn.Module):
        def __init__(self):
            super().__init__()
            self.packed = replace_linears(nn.Sequential(nn.Linear(64, 96, bias=False)), skip=())
            self.scale = nn.Parameter(torch.ones(96, 64))
            self.shift = nn.Parameter(torch.zeros(64))

        def forward(self, x):
            weight = torch.tanh(self.packed[0].dequantize() * self.scale)
            return (x + self.shift) @ weight.t()

    report = mg.doctor(Expanding(), {"x": torch.randn(3, 64)}, loss=square)
    assert report.weight_copies, str(report)
    assert not report.holds


def test_the_command_reads_a_recipe_and_its_exit_code_is_the_promise(tmp_path, capsys):
    make_tokenizer(tmp_path / "model")
    make_model(tmp_path / "model")
    rows = [{"text": " ".join(["fox"] * (5 + n))} for n in range(30)]
    write_jsonl(tmp_path / "train.jsonl", rows)
    change = {
        "output_dir": str(tmp_path / "out"),
        "micro_batch_size": 1,
        "num_epochs": 1,
        "learning_rate": 0.001,
    }
    recipe = small_recipe(tmp_path, "completion", **change)
    (tmp_path / "recipe.yml").write_text(yaml.safe_dump(recipe))
    assert main(["doctor", str(tmp_path / "recipe.yml"), "--trace-only", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["holds"] is True
    assert report["graphs"] == 1
