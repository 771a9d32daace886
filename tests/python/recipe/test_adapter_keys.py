"""Keys of an adapter beside each other, beside lora_model_dir, and in a resumed run."""

import json
from dataclasses import fields, replace

import pytest
from transformers import AutoModelForCausalLM

from monograph.recipe import ConfigError, check_keys
from monograph.recipe.config.keys import KEYS, Recipe
from monograph.recipe.config.model_checks import ADAPTER_KEYS
from monograph.recipe.run.load_model import adapter_config, load_model
from monograph.recipe.run.run_identity import compare, run_identity
from monograph.recipe.train import train
from support.recipe_files import make_instruction_world, small_recipe


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_instruction_world(tmp_path_factory.mktemp("keys"))


def adapted(model):
    names = (name for name, p in model.named_parameters() if p.requires_grad)
    return {name.split(".lora_")[0].rpartition(".")[2] for name in names}


def test_names_beside_all_linear_layers_are_more_layers(root):
    keys = {"lora_target_linear": True, "lora_target_modules": ["embed_tokens", "lm_head", "q_proj"]}
    both = check_keys(small_recipe(root, "instruction", **keys)).recipe
    linear = check_keys(small_recipe(root, "instruction")).recipe
    found = adapted(load_model(both, str(root / "model")))
    assert found == adapted(load_model(linear, str(root / "model"))) | {"embed_tokens", "lm_head"}
    # The config itself, as TRL gets it.
    base = AutoModelForCausalLM.from_pretrained(root / "model")
    assert {"embed_tokens", "lm_head"} < set(adapter_config(both, base).target_modules)


def test_an_expression_beside_all_linear_layers_is_refused(root):
    keys = {"lora_target_linear": True, "lora_target_modules": ".*q_proj"}
    with pytest.raises(ConfigError, match=r"regular expression '.\*q_proj' and lora_target_linear true"):
        check_keys(small_recipe(root, "instruction", **keys))


@pytest.fixture(scope="module")
def start(root):
    keys = small_recipe(root, "instruction", output_dir=str(root / "A"), max_steps=1, step_mode="eager")
    train(check_keys(keys).recipe)
    return str(root / "A")


OTHER = {
    "lora_r": 16,  # the default, but written
    "lora_alpha": 7,
    "lora_dropout": 0.3,
    "lora_modules_to_save": ["lm_head"],
    "lora_rank_pattern": {"q_proj": 2},
    "lora_alpha_pattern": {"q_proj": 2},
    "peft_use_rslora": True,
    "peft_use_dora": True,
    "peft_layers_to_transform": [0],
    "peft_layers_pattern": "layers",
    "peft_trainable_token_indices": [3],
    "peft_ensure_weight_tying": True,
}
TOLD = {
    "lora_target_modules": ["q_proj"],
    "lora_target_parameters": ["mlp.experts.down_proj"],
    "peft_init_lora_weights": "pissa",
    "peft": {"loftq_config": {"loftq_bits": 4}},
}


def test_all_keys_of_an_adapter_are_tried_here():
    assert {*OTHER, *TOLD, "lora_target_linear"} == set(ADAPTER_KEYS)


@pytest.mark.parametrize("name", OTHER)
def test_another_value_beside_lora_model_dir_is_refused(root, start, name):
    keys = {"lora_model_dir": start, name: OTHER[name]}
    with pytest.raises(ConfigError, match=f"{name} is .*the adapter of lora_model_dir .* has"):
        check_keys(small_recipe(root, "instruction", **keys))


@pytest.mark.parametrize("name", TOLD)
def test_what_cannot_be_compared_is_told(root, start, name):
    keys = {"lora_model_dir": start, "lora_target_linear": False, name: TOLD[name]}
    notices = check_keys(small_recipe(root, "instruction", **keys)).notices
    assert f"{name}: ignored; the adapter of lora_model_dir goes on with its own layers and start" in notices


def test_the_same_values_are_not_spoken_of(root, start):
    keys = small_recipe(root, "instruction", lora_model_dir=start, lora_alpha=32, lora_dropout=0.0)
    keys |= {"lora_modules_to_save": [], "peft_use_dora": False}
    del keys["lora_target_linear"]
    assert not [text for text in check_keys(keys).notices if "lora_model_dir" in text]


# Values that differ from those of a small recipe, for keys whose default says nothing of them.
CHANGED = {
    "virtual_shards": 3,
    "bf16": False,
    "fp16": True,
    "adapter": "lora",
    "attn_implementation": "sdpa",
    "lr_scheduler": "linear",
    "excess_length_strategy": "truncate",
    "step_mode": "eager",
    "chat_template_jinja": "{{ messages }}",
}


def changed(name, value):
    if name in CHANGED:
        return CHANGED[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, dict):
        return {"x": 1}
    return "x" if isinstance(value, str) or value is None else ["x"]


def test_every_key_is_compared_told_or_listed_as_free(root):
    recipe = check_keys(small_recipe(root, "instruction")).recipe
    free = [name for name, row in KEYS.items() if row.resume.state == "free"]
    assert len(free) == 62
    assert all(KEYS[name].resume.why for name in free)
    before = run_identity(recipe)
    for entry in fields(Recipe):
        name = entry.name
        if name in (*free, "datasets"):
            continue
        now = run_identity(replace(recipe, **{name: changed(name, getattr(recipe, name))}))
        assert now != before, f"{name}: neither compared nor free"


def test_the_three_keys_that_were_forgotten_are_compared(root):
    recipe = check_keys(small_recipe(root, "instruction")).recipe
    before = run_identity(recipe)
    for name, value in (
        ("lora_target_parameters", ["mlp.experts.down_proj"]),
        ("output_router_logits", True),
        ("router_aux_loss_coef", 0.5),
    ):
        with pytest.raises(ValueError, match=f"resume_from_checkpoint: {name} is"):
            compare(before, run_identity(replace(recipe, **{name: value})), "checkpoint-1")


def test_a_dataset_of_other_keys_is_another_run(root):
    recipe = check_keys(small_recipe(root, "instruction")).recipe
    entry = replace(recipe.datasets[0], shards=2)
    with pytest.raises(ValueError, match="datasets is"):
        compare(run_identity(recipe), run_identity(replace(recipe, datasets=[entry])), "checkpoint-1")
    json.dumps(run_identity(recipe))
