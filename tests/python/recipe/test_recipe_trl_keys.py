"""Keys of recipes that TRL trains: which engine, which field, and what is refused by name."""

import dataclasses
import inspect
import re

import pytest
import trl
import yaml

from monograph.__main__ import main
from monograph.recipe import Recipe, check_keys
from monograph.recipe.config.key_row import rows_of
from monograph.recipe.config.key_support import IGNORED, REFUSED
from monograph.recipe.config.keys import TRL_KEYS, TrlRecipe
from monograph.recipe.config.trl_arguments import config_arguments, field_names
from monograph.recipe.config.trl_checks import DPO_LOSSES, SMOOTHED_LOSSES
from monograph.recipe.config.trl_choose import METHODS, trainer_classes
from monograph.upstream import trl_names
from support.recipe_files import errors_of


@pytest.fixture
def good(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return {
        "base_model": str(tmp_path / "model"),
        "adapter": "qlora",
        "lora_target_linear": True,
        "datasets": [{"path": "train.jsonl", "type": "alpaca"}],
    }


def arguments_of(keys):
    recipe = check_keys(keys).recipe
    return config_arguments(recipe, field_names(trainer_classes(recipe.method)[1]))


def test_the_engine_is_ours_unless_asked(good):
    assert type(check_keys(good).recipe) is Recipe
    assert (
        type(check_keys(good | {"trainer": "monograph", "rl": None, "reward_model": False}).recipe) is Recipe
    )
    pairs = {"datasets": [{"path": "a", "type": "chat_template.default"}]}
    for change in ({"trainer": "trl"}, {"rl": "dpo"} | pairs, {"reward_model": True} | pairs):
        assert type(check_keys(good | change).recipe) is TrlRecipe


def test_every_key_of_the_other_engine_is_known_to_ours():
    """Never an unknown key: each is refused or ignored there with its reason."""
    assert len(TRL_KEYS) > 40
    for name, row in TRL_KEYS.items():
        assert (name in IGNORED) + (name in REFUSED) == 1, name
        assert row.own is not None, name
        assert row.trl is not None, name
    for name, row in rows_of(TrlRecipe).items():
        assert row.to_trl is None or isinstance(row.trl, str), name
        assert set(row.methods) <= set(METHODS), name


def test_every_field_of_the_table_is_one_of_trl():
    everything = set().union(*(field_names(trainer_classes(method)[1]) for method in METHODS.values()))
    named = {row.trl for row in rows_of(TrlRecipe).values() if isinstance(row.trl, str)}
    assert len(named) > 60
    assert named <= everything
    for method in METHODS.values():
        assert set(method.fixed) <= field_names(trainer_classes(method)[1])


def test_keys_become_fields(good):
    keys = {
        "trainer": "trl",
        "micro_batch_size": 3,
        "num_epochs": 2,
        "evals_per_epoch": 4,
        "saves_per_epoch": 1,
        "val_set_size": 0.1,
        "optimizer": "adafactor",
        "optim_args": {"scale_parameter": False, "relative_step": False},
        "lr_scheduler": "cosine",
        "cosine_min_lr_ratio": 0.1,
        "warmup_ratio": 0.05,
        "neftune_noise_alpha": 5,
        "hub_model_id": "me/adapter",
        "hub_strategy": "checkpoint",
        "use_tensorboard": True,
        "sample_packing": True,
        "group_by_length": True,
        "gradient_checkpointing": True,
        "torch_compile": True,
    }
    got = arguments_of(good | keys)
    want = {
        "per_device_train_batch_size": 3,
        "num_train_epochs": 2,
        "eval_strategy": "steps",
        "eval_steps": 1 / 8,
        "save_strategy": "epoch",
        "optim": "adafactor",
        "optim_args": "scale_parameter=False,relative_step=False",
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "warmup_steps": 0.05,
        "neftune_noise_alpha": 5.0,
        "hub_model_id": "me/adapter",
        "hub_strategy": "checkpoint",
        "push_to_hub": True,
        "report_to": ["tensorboard"],
        "packing": True,
        "max_length": 2048,
        "train_sampling_strategy": "group_by_length",
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "torch_compile": True,
        "bf16": True,
    }
    assert {name: got.get(name) for name in want} == want


def test_the_defaults_are_those_of_a_recipe(good):
    got = arguments_of(good | {"trainer": "trl"})
    assert (got["learning_rate"], got["lr_scheduler_type"], got["optim"]) == (2e-4, "cosine", "adamw_torch")
    assert (got["gradient_checkpointing"], got["report_to"], got["eval_strategy"]) == (False, "none", "no")
    assert not got["logging_nan_inf_filter"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"virtual_shards": 2},
            "virtual_shards: trainer is trl, and SFTTrainer has no such thing; leave it out",
        ),
        ({"shard_size": 2}, "shard_size: trainer is trl, and SFTTrainer has no such thing; leave it out"),
        ({"rl_beta": 0.1}, "rl_beta: SFTConfig of TRL has no field beta; leave it out"),
        ({"trl": {"bta": 0.1}}, "trl.bta: SFTConfig of TRL has no field bta; leave it out"),
        (
            {"trl": {"max_length": 8}, "sequence_len": 9},
            "sequence_len and trl.max_length both say max_length",
        ),
        (
            {"trl": {"reward_funcs": ["a.b"]}},
            "trl.reward_funcs: SFTTrainer takes none; they are for rl: grpo",
        ),
        ({"device": "cuda"}, "device is cuda: trainer: trl computes on a CPU; leave it out"),
        ({"step_mode": "whole_step"}, "step_mode is whole_step, which no trainer of TRL has; wanted graph"),
        ({"fp16": True, "bf16": False}, "fp16: accelerate scales no loss on a CPU"),
        ({"wandb_name": "a", "trackio_run_name": "b"}, "wandb_name and trackio_run_name both say run_name"),
        ({"optimizer": "nonsense"}, "optimizer is nonsense, wanted one of adamw_torch, "),
        ({"lr_scheduler": "nonsense"}, "lr_scheduler is nonsense, wanted one of linear, cosine, "),
        ({"trl": {"optim": "nonsense"}}, "trl.optim is nonsense, wanted one of adamw_torch, "),
        (
            {"lr_scheduler": "reduce_lr_on_plateau"},
            "lr_scheduler is reduce_lr_on_plateau: nothing is evaluated; write val_set_size: 0.05",
        ),
        (
            {"early_stopping_patience": 2, "val_set_size": 0.1},
            "early_stopping_patience: nothing is evaluated; write val_set_size",
        ),
        ({"orpo_alpha": 0.1}, "orpo_alpha: it is for rl: orpo, and trainer is trl without rl; leave it out"),
        (
            {"datasets": [{"path": "a", "type": "alpaca", "field_chosen": "b"}]},
            "datasets.0.field_chosen: it is for preferences (rl, reward_model); leave it out",
        ),
        (
            {"max_steps": 5, "saves_per_epoch": 2},
            "saves_per_epoch and max_steps: TRL knows shares of all steps",
        ),
    ],
)
def test_what_a_trainer_has_no_field_for_is_refused_by_name(change, message, good):
    (found,) = errors_of(good | {"trainer": "trl"} | change)
    assert found.startswith(message)


def test_names_that_transformers_has_are_taken(good):
    for change in (
        {"optimizer": "lion_8bit"},
        {"lr_scheduler": "wsd"},
        {"lr_scheduler": "reduce_lr_on_plateau", "val_set_size": 0.1, "evals_per_epoch": 1},
    ):
        check_keys(good | {"trainer": "trl"} | change)
    evaluated = {"trainer": "trl", "val_set_size": 0.1, "evals_per_epoch": 1, "early_stopping_patience": 2}
    assert arguments_of(good | evaluated)["metric_for_best_model"] == "loss"


def test_losses_of_dpo_are_those_of_trl():
    """By the help of TRL's config, and by the source of its loss for those that use label_smoothing."""
    (entry,) = [entry for entry in dataclasses.fields(trl.DPOConfig) if entry.name == "loss_type"]
    assert tuple(re.findall(r"`'(\w+)'`", entry.metadata["help"])) == DPO_LOSSES
    parts = re.split(r'if loss_type == "(\w+)":', inspect.getsource(trl.DPOTrainer))
    smoothed = {name for name, code in zip(parts[1::2], parts[2::2], strict=True) if "label_smooth" in code}
    assert smoothed == set(SMOOTHED_LOSSES)


def test_what_only_a_run_finds_wrong_names_its_key(good, tmp_path, capsys):
    """Names of callbacks are looked up, and the config is made, before data and model are read."""
    path = tmp_path / "recipe.yml"
    for change, message in (
        (
            {"callbacks": ["nonsense.Foo"]},
            "recipe: callbacks: there is no module nonsense (for nonsense.Foo)",
        ),
        (
            {"load_best_model_at_end": True, "val_set_size": 2, "eval_steps": 2, "save_steps": 3},
            "recipe: --load_best_model_at_end requires the saving steps to be a round multiple",
        ),
    ):
        path.write_text(yaml.safe_dump(good | {"trainer": "trl", "output_dir": str(tmp_path / "o")} | change))
        assert main(["train", str(path)]) == 2
        assert message in capsys.readouterr().err


def test_experimental_trainers_are_where_they_were_read():
    for method in METHODS.values():
        if method.experimental:
            assert {method.trainer, method.config} <= set(trl_names.NAMES)
        assert dataclasses.is_dataclass(trainer_classes(method)[1])


def test_methods_are_trainers_with_their_fields(good):
    pairs = good | {"datasets": [{"path": "a", "type": "chat_template.default"}]}
    for method, name in (("ipo", "loss_type"), ("simpo", "loss_type")):
        got = arguments_of(pairs | {"rl": method, "rl_beta": 0.3})
        assert (got["beta"], got[name]) == (0.3, METHODS[method].fixed[name])
    got = arguments_of(pairs | {"rl": "dpo", "dpo_loss_type": "robust", "dpo_label_smoothing": 0.1})
    assert (got["loss_type"], got["label_smoothing"], got["max_length"]) == (["robust"], 0.1, 2048)
    got = arguments_of(pairs | {"rl": "kto", "kto_desirable_weight": 0.2, "eval_sample_packing": False})
    assert got["desirable_weight"] == 0.2
    assert arguments_of(pairs | {"rl": "orpo", "orpo_alpha": 0.2})["beta"] == 0.2
    rewards = {"reward_funcs": ["a.b"], "reward_weights": [2.0], "use_vllm": False, "beta": 0.001}
    got = arguments_of(pairs | {"rl": "gdpo", "trl": rewards, "chat_template_kwargs": {"thinking": False}})
    assert got["multi_objective_aggregation"] == "normalize_then_sum"
    assert (got["beta"], got["reward_weights"], "max_length" in got) == (0.001, [2.0], False)
    assert got["chat_template_kwargs"] == {"thinking": False}
    assert "reward_funcs" not in got
    assert "use_vllm" not in got or got["use_vllm"] is False


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rl": "dpo", "trainer": "monograph"},
            "rl is dpo and trainer monograph; TRL trains it: leave trainer",
        ),
        ({"rl": "dpo", "reward_model": True}, "rl is dpo and reward_model true; a run trains one of them"),
        ({"rl": "ppo"}, "rl is 'ppo' (str), wanted dpo, ipo, kto, orpo, simpo, grpo, gdpo"),
        ({"rl": "dpo", "sample_packing": True}, "sample_packing: DPOConfig of TRL has no field packing"),
        ({"rl": "orpo", "pad_to_sequence_len": True}, "pad_to_sequence_len: ORPOConfig of TRL has no field"),
        (
            {"rl": "ipo", "dpo_loss_type": "hinge"},
            "dpo_loss_type: rl: ipo is loss_type ['ipo']; leave it out",
        ),
        (
            {"rl": "dpo", "train_on_inputs": True},
            "train_on_inputs: trainer is trl, and DPOTrainer has no such",
        ),
        ({"rl": "dpo", "rl_beta": 0.1, "trl": {"beta": 0.2}}, "rl_beta and trl.beta both say beta"),
        ({"rl": "grpo"}, "trl.reward_funcs: missing; rl: grpo wants functions by name"),
        (
            {"rl": "grpo", "trl": {"reward_funcs": ["a.b"], "use_vllm": True}},
            "trl.use_vllm: not supported; completions are generated by the trained model itself",
        ),
        ({"reward_model": True, "num_labels": 3}, "num_labels is 3, wanted 1: a reward is one number"),
        ({"reward_model": True, "merge_lora": True}, "merge_lora: a reward model has a head that its base"),
        ({"rl": "dpo", "orpo_alpha": 0.1}, "orpo_alpha: it is for rl: orpo, and rl is dpo; leave it out"),
        ({"rl": "kto", "orpo_alpha": 0.0}, "orpo_alpha: it is for rl: orpo, and rl is kto; leave it out"),
        ({"rl": "kto", "dpo_loss_type": "hinge"}, "dpo_loss_type: it is for rl: dpo or ipo, and rl is kto"),
        ({"rl": "orpo", "simpo_gamma": 0.5}, "simpo_gamma: it is for rl: simpo, and rl is orpo"),
        ({"rl": "dpo", "cpo_alpha": 0.0}, "cpo_alpha: it is for rl: simpo, and rl is dpo"),
        (
            {"rl": "dpo", "kto_desirable_weight": 1.0},
            "kto_desirable_weight: it is for rl: kto, and rl is dpo",
        ),
        (
            {"rl": "simpo", "dpo_label_smoothing": 0.1},
            "dpo_label_smoothing: it is for rl: dpo, and rl is simpo",
        ),
        (
            {"reward_model": True, "dpo_loss_weights": [1.0]},
            "dpo_loss_weights: it is for rl: dpo, and reward",
        ),
        (
            {"rl": "dpo", "dpo_label_smoothing": 0.1},
            "dpo_label_smoothing: the loss sigmoid does not use it; write dpo_loss_type: robust",
        ),
        (
            {"rl": "dpo", "dpo_loss_type": "nonsense"},
            "dpo_loss_type is nonsense, wanted one of sigmoid, hinge",
        ),
        ({"rl": "dpo", "dpo_loss_weights": [1.0, 2.0]}, "dpo_loss_weights has 2 numbers for 1 losses"),
        (
            {"rl": "simpo", "trl": {"loss_type": "hinge"}},
            "trl.loss_type: rl: simpo is loss_type 'simpo'; leave",
        ),
        (
            {"rl": "kto", "trl": {"loss_type": "hinge"}},
            "trl.loss_type is hinge, wanted one of kto, apo_zero_unpaired",
        ),
        ({"process_reward_model": True}, "process_reward_model: not supported; TRL 1.16 has no trainer"),
    ],
)
def test_what_a_method_cannot_mean_is_refused(change, message, good):
    (found,) = errors_of(good | {"datasets": [{"path": "a", "type": "chat_template"}]} | change)
    assert found.startswith(message)
