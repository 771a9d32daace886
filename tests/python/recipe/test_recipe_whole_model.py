"""Recipes without an adapter under TRL: all weights of a dense base, or those of unfrozen_parameters."""

import pytest
import torch
import trl
import yaml
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from monograph.__main__ import main
from monograph.recipe import ConfigError, check_keys
from support.trl_recipes import ANSWERS, PROMPTS, columns, run_recipe, trl_keys, write_rows
from support.trl_runs import make_folder, tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    dense = make_folder(tmp_path_factory.mktemp("tiny"), layers=1).parent / "dense"
    tokenizer().save_pretrained(dense)
    return dense


def whole_keys(folder, root, **change):
    path = write_rows(root / "sft.jsonl", instruction=PROMPTS, output=ANSWERS)
    keys = trl_keys(folder, root, path, {"no_input_format": "{instruction} "}, trainer="trl", max_steps=6)
    for name in ("adapter", "lora_target_linear", "lora_r", "lora_alpha"):
        del keys[name]
    return keys | {"learning_rate": 0.002} | change


def plain_script(folder, root):
    """transformers and TRL alone."""
    options = {"per_device_train_batch_size": 4, "learning_rate": 0.002, "lr_scheduler_type": "constant"}
    options |= {"max_length": 16, "max_steps": 6, "logging_steps": 1, "save_strategy": "no", "seed": 3}
    options |= {"use_cpu": True, "bf16": False, "optim": "adamw_torch", "gradient_checkpointing": False}
    rows = {"prompt": [text + " " for text in PROMPTS], "completion": ANSWERS}
    trainer = trl.SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=trl.SFTConfig(str(root / "script"), pad_to_multiple_of=16, report_to="none", **options),
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer(),
    )
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


def test_all_weights_are_trained_as_by_a_script_and_answer(folder, tmp_path, capsys):
    """float32; the script has none of our layers, so the last bits of its losses differ."""
    keys = whole_keys(folder, tmp_path)
    lines = run_recipe(keys)
    script = plain_script(folder, tmp_path)
    for (ours, norm), (theirs, their_norm) in zip(
        columns(lines, "loss", "grad_norm"), columns(script, "loss", "grad_norm"), strict=True
    ):
        assert ours == pytest.approx(theirs, rel=1e-4)
        assert norm == pytest.approx(their_norm, rel=1e-3)
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert all(not torch.equal(after[name], before[name]) for name in before)
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "out"), "--prompt", "w0 w1", "--max-new-tokens", "2"]) == 0
    assert "w" in capsys.readouterr().out


def test_named_parameters_alone_are_trained_and_resumed_with_the_same_bits(folder, tmp_path):
    patterns = ["^lm_head.weight$", "model.layers.[0-9]+.mlp"]
    keys = whole_keys(folder, tmp_path, unfrozen_parameters=patterns, max_steps=4)
    keys |= {"save_strategy": None, "save_steps": 2}
    whole = run_recipe(keys)
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    after = load_file(tmp_path / "out" / "model.safetensors")
    changed = {name for name in before if not torch.equal(after[name], before[name])}
    assert changed == {name for name in before if ".mlp." in name} | {"lm_head.weight"}
    again = run_recipe(keys | {"resume_from_checkpoint": str(tmp_path / "out" / "checkpoint-2")})
    assert columns(again, "loss", "grad_norm") == columns(whole, "loss", "grad_norm")
    resumed = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(resumed[name], after[name]) for name in after)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_r": 8}, "adapter: missing, and lora_r is written; write adapter: qlora, or leave lora_r out"),
        ({"rl": "dpo"}, "adapter: missing; preferences and rewards are trained into an adapter"),
        ({"load_in_4bit": True}, "load_in_4bit: packed weights are not trained themselves; write adapter"),
        (
            {"unfrozen_parameters": ["a[:3]"]},
            "unfrozen_parameters: a[:3] names a range of rows, wanted whole",
        ),
        ({"unfrozen_parameters": ["a("]}, "unfrozen_parameters: a( is no regular expression"),
        (
            {"adapter": "lora", "lora_target_linear": True, "unfrozen_parameters": ["a"]},
            "unfrozen_parameters and adapter lora: the base of an adapter stays frozen",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(change, message, folder, tmp_path):
    with pytest.raises(ConfigError) as caught:
        check_keys(whole_keys(folder, tmp_path) | change)
    assert caught.value.errors[0].startswith(message)


def test_what_only_the_model_shows_is_refused_by_name(folder, tmp_path, capsys):
    path = tmp_path / "recipe.yml"
    packed = folder.parent / "nf4"
    for base, patterns, message in (
        (folder, ["lm_hed"], "unfrozen_parameters: lm_hed matches no parameter; names are like model.embed"),
        (packed, None, "adapter: missing, and the base is quantised; write adapter: qlora"),
    ):
        path.write_text(yaml.safe_dump(whole_keys(base, tmp_path, unfrozen_parameters=patterns)))
        assert main(["train", str(path)]) == 2
        assert message in capsys.readouterr().err


def test_bf16_weights_are_warned_of(folder, tmp_path):
    assert check_keys(whole_keys(folder, tmp_path)).notices == [
        "adapter: missing; the weights themselves are trained"
    ]
    (said,) = check_keys(whole_keys(folder, tmp_path, bf16=True)).notices
    assert said.endswith("in bfloat16, which loses small changes; write bf16: false")
