"""doctor under TRL: one graph, or breaks with cause and line; what torch_compile compiles; no trace left."""

import re

import pytest
import torch
import torch._dynamo
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters

import monograph as mg
from support.trl_runs import make_folder, trainer_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("tiny"), layers=1)


def breaks_by_file(report):
    return {cause.where.split("site-packages/")[1].split(":")[0]: cause.reason for cause in report.breaks}


def test_doctor_finds_the_breaks_of_plain_peft_under_a_trainer(folder, tmp_path):
    trainer = trainer_for("sft", mg.from_pretrained(folder, dtype=torch.float32), tmp_path)
    report = mg.doctor(trainer, steps=1)
    found = breaks_by_file(report)
    assert set(found) == {"trl/kernels/chunked_logprob.py", "transformers/modeling_utils.py"}
    assert "requires_grad_()" in found["transformers/modeling_utils.py"]
    assert all(re.search(r"\.py:\d+ in \w+", cause.where) for cause in report.breaks)
    assert "make_inputs_require_grads" in str(report)


def test_doctor_says_what_it_does_and_generates_code_only_if_asked(folder, tmp_path, capsys, monkeypatch):
    import torch._inductor.compile_fx as inductor

    compiled = []

    def without_code(graph, inputs, **_):  # stands for Inductor: its C++ takes half a minute
        compiled.append(graph)
        return aot_eager(graph, inputs)

    monkeypatch.setattr(inductor, "compile_fx", without_code)
    trainer = trainer_for("sft", mg.from_pretrained(folder, dtype=torch.float32), tmp_path)
    mg.optimize(trainer.model)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    capsys.readouterr()
    traced = mg.doctor(trainer, steps=2)
    said = capsys.readouterr().err
    assert "traces forward and backward of 2 steps; generates no code" in said
    assert re.search(r"graph 1 of \d+ nodes\n.*step 1 of 2\n.*step 2 of 2\n", said)
    assert not compiled
    assert traced.step_seconds == []
    report = mg.doctor(trainer, steps=2, inductor=True, quiet=True)
    assert "doctor:" not in capsys.readouterr().err
    assert len(compiled) == 1
    assert len(report.step_seconds) == 2
    assert report.holds
    assert "first step" in str(report)
    assert all(torch.equal(before[n], p) for n, p in trainer.model.named_parameters())


def test_their_own_head_breaks_the_graph(folder, tmp_path):
    trainer = trainer_for("sft", mg.from_pretrained(folder, dtype=torch.float32), tmp_path)
    mg.optimize(trainer.model, head=False)
    report = mg.doctor(trainer, steps=1)
    assert breaks_by_file(report) == {
        "trl/kernels/chunked_logprob.py": "Attempted to call op with non-contiguous `out=` tensor"
    }
    assert not report.holds


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_a_step_is_one_graph_and_doctor_changes_nothing(kind, folder, tmp_path):
    """Afterwards the trainer has the losses of one that was not asked."""
    trainer = trainer_for(kind, mg.from_pretrained(folder, dtype=torch.float32), tmp_path)
    mg.optimize(trainer.model)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    torch.manual_seed(7)
    report = mg.doctor(trainer, steps=2)
    assert (report.graphs, report.breaks, report.recompiles, report.weight_copies) == (1, [], [], [])
    assert report.holds
    assert all(torch.equal(before[n], p) for n, p in trainer.model.named_parameters())
    assert not trainer.state.log_history

    other = trainer_for(kind, mg.from_pretrained(folder, dtype=torch.float32), tmp_path)
    mg.optimize(other.model)
    losses = []
    for each in (trainer, other):
        torch.manual_seed(7)
        each.train()
        losses.append([entry["loss"] for entry in each.state.log_history if "loss" in entry])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3


def test_doctor_counts_what_torch_compile_in_the_arguments_compiles(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # the arguments write it; undone after the test
    model = mg.from_pretrained(folder, dtype=torch.float32)
    trainer = trainer_for("sft", model, tmp_path, torch_compile_backend="eager")
    mg.optimize(trainer.model)
    report = mg.doctor(trainer, steps=2)
    assert report.breaks == []
    torch._dynamo.reset()
    counters.clear()
    trainer.train()
    assert isinstance(trainer.model_wrapped, torch._dynamo.OptimizedModule)
    assert counters["stats"]["unique_graphs"] == report.graphs == 1
    torch._dynamo.reset()


def test_doctor_refuses_what_it_cannot_run(folder, tmp_path):
    trainer = trainer_for("sft", mg.from_pretrained(folder, dtype=torch.float32), tmp_path)
    with pytest.raises(ValueError, match=r"got str, wanted a model or a transformers\.Trainer"):
        mg.doctor("trainer")
    with pytest.raises(ValueError, match="batches is None, wanted one batch or several"):
        mg.doctor(trainer.model)
    with pytest.raises(ValueError, match="batches and loss are for a model"):
        mg.doctor(trainer, {"input_ids": torch.ones(1, 4)})
    with pytest.raises(ValueError, match="steps is 0, wanted 1 or more"):
        mg.doctor(trainer, steps=0)
