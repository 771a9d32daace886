"""Around a run under TRL: callbacks by name, early stopping, signals, and its adapter used afterwards."""

import os
import signal
import subprocess
import sys

import pytest
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

from monograph.__main__ import main
from monograph.recipe.run.metrics import read_metrics
from support.native_tool import program
from support.trl_recipes import ANSWERS, OTHERS, PROMPTS, TEMPLATE, sft_keys, write_rows
from support.trl_runs import make_folder, tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    packed = make_folder(tmp_path_factory.mktemp("tiny"), layers=1)
    words = tokenizer()
    words.chat_template = TEMPLATE
    words.save_pretrained(packed)
    return packed


@pytest.fixture(autouse=True)
def no_compilation_left(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")


class StopsAtThree(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == 3


class PressesCtrlC(TrainerCallback):
    """As a terminal does it, in the middle of the third step of a run that begins at its beginning."""

    def on_train_begin(self, args, state, control, **_):
        self.from_the_beginning = state.global_step == 0

    def on_substep_end(self, args, state, control, **_):
        if self.from_the_beginning and state.global_step == 2:
            os.kill(os.getpid(), signal.SIGINT)


def recipe(folder, root, name="recipe", **change):
    keys = sft_keys(folder, root, output_dir=str(root / name), **change)
    keys = {key: value for key, value in keys.items() if value is not None}
    (root / f"{name}.yml").write_text(yaml.safe_dump(keys))
    return str(root / f"{name}.yml")


def steps(out):
    return read_metrics(str(out / "metrics.jsonl"))


def tensors(out):
    return load_file(out / "adapter_model.safetensors")


def test_a_callback_by_its_name_ends_the_run(folder, tmp_path):
    asked = {"callbacks": [f"{__name__}.StopsAtThree"]}
    assert main(["train", recipe(folder, tmp_path, **asked)]) == 0
    assert [line["step"] for line in steps(tmp_path / "recipe")] == [1, 2, 3]
    assert (tmp_path / "recipe" / "adapter_model.safetensors").exists()


def test_a_run_that_gets_no_better_stops_early_with_its_best(folder, tmp_path):
    """At so small a rate no weight changes: the first evaluation is the best, two more are waited for."""
    asked = {"early_stopping_patience": 2, "load_best_model_at_end": True, "val_set_size": 4, "eval_steps": 1}
    path = recipe(folder, tmp_path, **asked, save_steps=1, save_strategy=None, learning_rate=1e-12)
    assert main(["train", path]) == 0
    out = tmp_path / "recipe"
    losses = {line["step"]: line["eval_loss"] for line in steps(out) if "eval_loss" in line}
    best = min(losses, key=losses.__getitem__)
    assert (best, sorted(losses)) == (1, [1, 2, 3])
    kept, wanted = tensors(out), tensors(out / f"checkpoint-{best}")
    assert kept.keys() == wanted.keys()
    assert all(kept[name].equal(wanted[name]) for name in kept)


def test_ctrl_c_saves_and_the_run_goes_on_to_the_same_bits(folder, tmp_path, capsys):
    events = {"lr_scheduler": "linear", "lora_dropout": 0.25, "max_steps": 5, "save_strategy": None}
    events |= {"gradient_accumulation_steps": 2, "micro_batch_size": 2, "save_steps": 100}
    assert main(["train", recipe(folder, tmp_path, "whole", **events)]) == 0
    asked = {"callbacks": [f"{__name__}.PressesCtrlC"]}
    path = recipe(folder, tmp_path, "broken", **events, **asked)
    assert main(["train", path]) == 130
    assert "go on with --resume-from-checkpoint auto" in capsys.readouterr().out
    assert not (tmp_path / "broken" / "adapter_model.safetensors").exists()
    assert main(["train", path, "--resume-from-checkpoint", "auto"]) == 0
    whole, broken = tensors(tmp_path / "whole"), tensors(tmp_path / "broken")
    assert whole.keys() == broken.keys()
    assert all(whole[name].equal(broken[name]) for name in whole)
    kept = [[line["loss"] for line in steps(tmp_path / name)] for name in ("whole", "broken")]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_what_was_trained_answers_and_is_merged(kind, folder, tmp_path, capsys):
    change = {"max_steps": 30}
    if kind == "dpo":
        columns = {"messages": PROMPTS, "chosen": ANSWERS, "rejected": OTHERS}
        path = write_rows(tmp_path / "dpo.jsonl", **columns)
        change |= {"rl": "dpo", "trainer": None, "sequence_len": 48, "max_steps": 4}
        change["datasets"] = [{"path": path, "type": "chat_template.default"}]
    path = recipe(folder, tmp_path, **change)
    assert main(["train", path]) == 0
    out = str(tmp_path / "recipe")
    capsys.readouterr()
    assert main(["generate", out, "--prompt", PROMPTS[3], "--max-new-tokens", "3"]) == 0
    said = capsys.readouterr().out.split()
    if kind == "sft":
        assert said == ANSWERS[3].split()
    environ = os.environ | {"MONOGRAPH_TOOL": str(program())}
    merge = [sys.executable, "-m", "monograph", "merge", out, "--out", str(tmp_path / "merged")]
    subprocess.run(merge, check=True, env=environ)  # the native tool takes over the process
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    prompt = PROMPTS[3] + " " if kind == "sft" else f"user {PROMPTS[3]} <eos> assistant "
    ids = tokenizer()(prompt, return_tensors="pt").input_ids
    answer = model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert tokenizer().decode(answer[0, ids.shape[1] :], skip_special_tokens=True).split() == said
