"""What goes wrong in a run of a recipe and must not end it, or must end it with everything saved."""

import json
import os
import signal

import pytest
import torch

from monograph.__main__ import main
from monograph.recipe import check_keys
from monograph.recipe.data.encode import load_tokenizer
from monograph.recipe.data.prepare import prepare
from monograph.recipe.run.batches import Batches
from monograph.recipe.run.checkpoint import checkpoints
from monograph.recipe.run.load_model import load_model
from monograph.recipe.run.metrics import read_metrics
from monograph.recipe.run.progress import Reporter
from monograph.recipe.run.schedule import learning_rate
from monograph.recipe.run.train import Run
from monograph.recipe.train import train
from monograph.training import TrainStep
from support.recipe_files import make_model, make_tokenizer, small_recipe, write_jsonl


def make_world(root, bad_documents):
    """A model that gives NaN for the token "@", and forty instructions, so many of them with it."""
    tokenizer = make_tokenizer(root / "model")
    model = make_model(root / "model")
    (token,) = tokenizer("@", add_special_tokens=False)["input_ids"]
    model.model.embed_tokens.weight.data[token] = float("nan")
    model.save_pretrained(root / "model")
    rows = [{"instruction": f"What is {n}?", "output": f"{n} dog {n % 7}"} for n in range(40)]
    for row in rows[:bad_documents]:
        row["instruction"] += "@"
    write_jsonl(root / "train.jsonl", rows)


@pytest.fixture
def recipe(tmp_path):
    base = small_recipe(
        tmp_path, "instruction", output_dir=str(tmp_path / "out"), lora_dropout=0.05, torch_compile=False
    )
    return lambda **change: check_keys(base | change).recipe


def trace(folder):
    lines = read_metrics(os.path.join(folder, "metrics.jsonl"))
    return [(line["step"], line.get("loss"), line.get("skipped_steps")) for line in lines]


def adapter_bytes(folder):
    with open(os.path.join(folder, "adapter_model.safetensors"), "rb") as file:
        return file.read()


def test_a_step_without_a_loss_is_skipped_counted_and_resumed_to_the_same_bits(recipe, tmp_path, capsys):
    make_world(tmp_path, bad_documents=1)
    whole = recipe(save_steps=1, save_total_limit=100)
    outcome = train(whole)
    assert outcome.step == outcome.total
    lines = trace(whole.output_dir)
    (bad,) = [step for step, loss, _ in lines if loss is None]
    assert 1 < bad < outcome.total, "the case needs good steps before and behind it"
    assert (bad, None, 1) in lines
    assert f"step {bad} skipped: loss nan (1 so far)" in capsys.readouterr().err
    with open(os.path.join(whole.output_dir, f"checkpoint-{bad}", "trainer_state.json")) as file:
        assert json.load(file)["skipped"] == 1

    # The reference is a loop that never makes the bad step.
    folder = whole.base_model
    tokenizer = load_tokenizer(whole, folder)
    batches = Batches(whole, prepare(whole, tokenizer).train, tokenizer.pad_token_id, training=True)
    epochs = batches.epochs(whole)
    step = TrainStep(load_model(whole, folder), mode="eager", seed=whole.seed)
    for number in range(epochs.total):
        if number + 1 != bad:
            step(batches.step(*epochs.place(number)), learning_rate(whole, number, epochs.total))
    last = Run(recipe(resume_from_checkpoint="auto"), tokenizer, prepare(whole, tokenizer), folder)
    assert torch.equal(last.step.state.flat, step.state.flat)

    for start in (bad - 1, bad):
        again = recipe(
            output_dir=str(tmp_path / f"from-{start}"),
            resume_from_checkpoint=os.path.join(whole.output_dir, f"checkpoint-{start}"),
        )
        train(again)
        assert trace(again.output_dir) == [line for line in lines if line[0] > start]
        assert adapter_bytes(again.output_dir) == adapter_bytes(whole.output_dir)


def test_several_steps_without_a_loss_end_the_run_with_a_checkpoint(recipe, tmp_path):
    make_world(tmp_path, bad_documents=40)
    with pytest.raises(ValueError, match=r"steps 1 to 2 had a loss or gradient that is not finite") as caught:
        train(recipe(max_bad_steps=2))
    saved = checkpoints(str(tmp_path / "out"))
    assert list(saved) == [2]
    assert f"saved {saved[2]}" in str(caught.value)
    with pytest.raises(ValueError, match="steps 3 to 4 had"):  # a resumed run may try again
        train(recipe(max_bad_steps=2, resume_from_checkpoint="auto"))


def test_a_run_that_learnt_nothing_is_an_error(recipe, tmp_path):
    make_world(tmp_path, bad_documents=40)
    with pytest.raises(ValueError, match=r"each of the 2 steps had .* nothing was learnt; saved .*-2"):
        train(recipe(max_steps=2))
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize(("key", "value"), [("tie_word_embeddings", "x"), ("hidden_size", None)])
def test_a_config_that_transformers_refuses_is_named(recipe, tmp_path, key, value):
    make_world(tmp_path, bad_documents=0)
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ValueError, match=rf"^base_model: .*{key}"):
        train(recipe())


def test_sigterm_saves_as_ctrl_c_does_and_handlers_are_put_back(recipe, tmp_path, monkeypatch, capsys):
    make_world(tmp_path, bad_documents=0)
    ordinary = Reporter.step

    def terminated(self, *arguments):
        if self._done + 1 == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return ordinary(self, *arguments)

    path = tmp_path / "recipe.yml"
    keys = small_recipe(tmp_path, "instruction", output_dir=str(tmp_path / "out"), torch_compile=False)
    path.write_text(json.dumps(keys))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        patch.setattr(Reporter, "step", terminated)
        assert main(["train", str(path)]) == 128 + signal.SIGTERM
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert "stopped after step 2; saved" in capsys.readouterr().err
    assert list(checkpoints(str(tmp_path / "out"))) == [2]
    assert main(["train", str(path), "--resume-from-checkpoint", "auto"]) == 0
    whole = recipe(output_dir=str(tmp_path / "whole"), lora_dropout=0.0)
    train(whole)
    assert adapter_bytes(str(tmp_path / "out")) == adapter_bytes(whole.output_dir)


def test_a_second_run_into_one_folder_with_extra_chat_templates(recipe, tmp_path):
    make_world(tmp_path, bad_documents=0)
    make_tokenizer(tmp_path / "model", chat_template={"default": "first", "tool_use": "tools"})
    out = tmp_path / "out"
    for _ in range(2):
        train(recipe(max_steps=1))
        assert (out / "additional_chat_templates" / "tool_use.jinja").read_text() == "tools"
        assert not (out / "final").exists()


def test_a_model_whose_loss_would_be_another_is_refused_at_the_start(recipe, tmp_path):
    """Llama knows no logit_scale; a loss that took it from the config would not be the model's."""
    make_world(tmp_path, bad_documents=0)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"logit_scale": 0.5}))
    with pytest.raises(ValueError, match="the logits of LlamaForCausalLM are not those of its head"):
        train(recipe(max_steps=1))
    assert checkpoints(str(tmp_path / "out")) == {}


def test_train_says_what_is_missing_from_the_data(recipe, tmp_path, capsys):
    make_world(tmp_path, bad_documents=0)
    with open(tmp_path / "train.jsonl", "a") as file:
        file.write(json.dumps({"instruction": "the dog " * 200, "output": "Ada"}) + "\n")
        file.write(json.dumps({"instruction": "the dog ", "output": "Ada " * 200}) + "\n")
    train(recipe(max_steps=1))
    assert "of 42 rows: 2 too long" in capsys.readouterr().err
    train(recipe(max_steps=1, excess_length_strategy="truncate"))
    assert "of 42 rows: 1 without a target, 2 truncated" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["eager", "whole_step"])
def test_an_infinite_loss_with_a_finite_gradient_changes_nothing(recipe, tmp_path, mode):
    make_world(tmp_path, bad_documents=0)
    read = recipe()
    tokenizer = load_tokenizer(read, read.base_model)
    batches = Batches(read, prepare(read, tokenizer).train, tokenizer.pad_token_id, training=True)
    step = TrainStep(load_model(read, read.base_model), mode=mode, backend="eager")
    step._module.register_forward_hook(lambda module, arguments, loss: loss + float("inf"))
    before = step.state.flat.clone()
    result = step(batches.step(0, 0), 0.01)
    assert result.loss == float("inf")
    assert not result.grad_norm.isfinite()
    assert torch.equal(step.state.flat, before)


def test_overflows_of_a_scaled_loss_end_no_run(recipe, tmp_path, capsys):
    """The scale is halved until gradients of float16 are finite: more often than max_bad_steps."""
    make_world(tmp_path, bad_documents=0)
    model = make_model(tmp_path / "model")
    with torch.no_grad():
        model.lm_head.weight *= 300
    model.save_pretrained(tmp_path / "model")
    read = recipe(fp16=True, max_bad_steps=1, num_epochs=2)
    outcome = train(read)
    assert outcome.step == outcome.total
    skipped = [step for step, loss, _ in trace(read.output_dir) if loss is None]
    assert 1 < len(skipped) < outcome.total
    assert "skipped: gradient norm" in capsys.readouterr().err
