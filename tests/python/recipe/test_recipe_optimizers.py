"""Optimizers and schedules of recipes: the losses of a script, transformers' rates, and refusals by name."""

import math

import pytest
import torch
import transformers
from peft.optimizers import create_loraplus_optimizer

from monograph.recipe import ConfigError, Recipe, check_keys
from monograph.recipe.config.trl_arguments import config_arguments, field_names
from monograph.recipe.config.trl_choose import trainer_classes
from monograph.recipe.run.schedule import learning_rate
from support.trl_recipes import ANSWERS, PROMPTS, columns, run_recipe, run_script, trl_keys, write_rows
from support.trl_runs import make_folder

STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("tiny"), layers=1)


def loraplus(trainer):
    trainer.optimizer = create_loraplus_optimizer(
        trainer.model, torch.optim.AdamW, lr=0.02, loraplus_lr_ratio=4.0, eps=1e-8, betas=(0.9, 0.999)
    )


def muon(trainer):
    trained = [value for value in trainer.model.parameters() if value.requires_grad]
    trainer.optimizer = torch.optim.Muon(trained, lr=0.02, weight_decay=0.0)


def rex(trainer):
    """z / (0.1 + 0.9 z), z the share of the steps that is left."""
    trainer.create_optimizer()
    shares = [1.0, 0.75 / 0.775, 0.5 / 0.55, 0.25 / 0.325, 0.0]
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, shares.__getitem__)


def wsd(trainer):
    trainer.create_optimizer()
    trainer.lr_scheduler = transformers.get_wsd_schedule(trainer.optimizer, 1, 1, STEPS)


@pytest.mark.parametrize(
    ("keys", "prepare", "arguments"),
    [
        ({"loraplus_lr_ratio": 4.0}, loraplus, {}),
        ({"optimizer": "muon"}, muon, {}),
        ({"optimizer": "adamw_8bit"}, None, {"optim": "adamw_bnb_8bit"}),
        ({"lr_scheduler": "rex"}, rex, {}),
        ({"lr_scheduler": "wsd", "warmup_steps": 1}, wsd, {}),
        ({"lr_scheduler": "inverse_sqrt", "warmup_steps": 2}, None, {"lr_scheduler_type": "inverse_sqrt"}),
        ({"neftune_noise_alpha": 5.0}, None, {"neftune_noise_alpha": 5.0}),
    ],
    ids=["loraplus", "muon", "adamw_8bit", "rex", "wsd", "inverse_sqrt", "neftune"],
)
def test_a_recipe_has_the_losses_of_the_script(keys, prepare, arguments, folder, tmp_path):
    if "warmup_steps" in keys:
        arguments = arguments | {"warmup_steps": keys["warmup_steps"]}
    path = write_rows(tmp_path / "sft.jsonl", instruction=PROMPTS, output=ANSWERS)
    kind = {"no_input_format": "{instruction} "}
    given = trl_keys(folder, tmp_path, path, kind, trainer="trl", **{"max_steps": STEPS} | keys)
    lines = run_recipe(given)
    rows = {"prompt": [text + " " for text in PROMPTS], "completion": ANSWERS}
    script = run_script("sft", folder, tmp_path, rows, prepare=prepare, **{"max_steps": STEPS} | arguments)
    names = ("loss", "grad_norm", "learning_rate")
    assert columns(lines, *names) == columns(script, *names)
    assert len(lines) == STEPS


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("name", ["inverse_sqrt", "warmup_stable_decay", "linear", "cosine"])
def test_rates_of_our_trainer_are_those_of_transformers(name, warmup):
    """After the warm-up, which begins at a rate above zero here."""
    total, peak = 50, 3e-4
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    options = {"num_decay_steps": 5} if name == "warmup_stable_decay" else None
    schedule = transformers.get_scheduler(name, optimizer, warmup, total, options)
    recipe = Recipe(lr_scheduler=name, learning_rate=peak, warmup_steps=warmup)
    for step in range(total):
        rate = learning_rate(recipe, step, total)
        if step >= warmup:
            assert rate == pytest.approx(schedule.get_last_lr()[0], rel=1e-12, abs=1e-18)
        else:
            assert rate == pytest.approx(peak * (step + 1) / warmup)
        optimizer.step()
        schedule.step()


def test_axolotls_names_of_torchao_are_those_of_transformers(folder):
    keys = {"base_model": str(folder), "adapter": "qlora", "lora_target_linear": True, "trainer": "trl"}
    keys["datasets"] = [{"path": "a.jsonl", "type": "completion"}]
    for written, wanted in (("ao_adamw_8bit", "adamw_torch_8bit"), ("adamw_torch_4bit", "adamw_torch_4bit")):
        recipe = check_keys(keys | {"optimizer": written}).recipe
        config = trainer_classes(recipe.method)[1]
        assert config_arguments(recipe, field_names(config))["optim"] == wanted


def test_rex_is_high_for_long_and_ends_at_its_least():
    recipe = Recipe(lr_scheduler="rex", learning_rate=1.0, cosine_min_lr_ratio=0.2)
    rates = [learning_rate(recipe, step, 10) for step in range(11)]
    assert rates[0] == 1.0
    assert math.isclose(rates[5], 0.2 + 0.8 * 0.5 / 0.55)
    assert math.isclose(rates[10], 0.2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": "schedule_free_adamw"}, "schedule_free_adamw, which needs schedulefree: pip install"),
        (
            {"optimizer": "lomo"},
            "optimizer is lomo, which needs lomo-optim: pip install lomo-optim, or write",
        ),
        ({"loraplus_lr_ratio": 0.5}, "loraplus_lr_ratio is 0.5, wanted 1 or more"),
        ({"loraplus_lr_embedding": 1e-5}, "loraplus_lr_embedding: loraplus_lr_ratio is missing"),
        ({"loraplus_lr_ratio": 2.0, "optimizer": "muon"}, "loraplus_lr_ratio and optimizer muon"),
        ({"lr_scheduler": "rex", "lr_scheduler_kwargs": {"a": 1}}, "lr_scheduler_kwargs: rex has none"),
        ({"trl": {"optim": "muon"}}, "trl.optim is muon, wanted one of adamw_torch, "),
    ],
)
def test_what_cannot_be_is_refused_by_name(change, message, folder, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    keys = {"base_model": str(folder), "adapter": "qlora", "lora_target_linear": True, "trainer": "trl"}
    keys["datasets"] = [{"path": "a.jsonl", "type": "completion"}]
    with pytest.raises(ConfigError) as caught:
        check_keys(keys | change)
    assert message in caught.value.errors[0]


def test_muon_names_what_is_no_matrix(folder, tmp_path):
    path = write_rows(tmp_path / "sft.jsonl", instruction=PROMPTS, output=ANSWERS)
    keys = trl_keys(folder, tmp_path, path, {"no_input_format": "{instruction} "}, trainer="trl")
    with pytest.raises(ConfigError, match=r"muon, which takes matrices alone, and .*norm.* has 1 dim"):
        run_recipe(keys | {"optimizer": "muon", "lora_modules_to_save": ["norm"]})
