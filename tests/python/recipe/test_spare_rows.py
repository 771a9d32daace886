"""New tokens that fit into rows which the embedding has to spare are trained too, or refused."""

import pytest
from safetensors.torch import load_file

from monograph.recipe import check_keys
from monograph.recipe.train import train
from support.recipe_files import make_model, make_tokenizer, small_recipe, write_jsonl

NEW = [400, 401]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("spare")
    make_tokenizer(root / "model")
    make_model(root / "model", vocab_size=450)
    rows = [{"instruction": f"What is {n}? <call>", "output": f"{n} dog<done>"} for n in range(20)]
    write_jsonl(root / "train.jsonl", rows)
    return root


def go(root, **keys):
    base = {
        "output_dir": str(root / "out"),
        "max_steps": 1,
        "step_mode": "eager",
        "tokens": ["<call>", "<done>"],
    }
    return train(check_keys(small_recipe(root, "instruction", **(base | keys))).recipe)


UNTRAINED = {
    "a norm": {"lora_modules_to_save": ["norm"]},
    "another row": {"peft_trainable_token_indices": [5]},
    "one of them": {"peft_trainable_token_indices": {"embed_tokens": [5, 400], "lm_head": NEW}},
    "the head alone": {"lora_modules_to_save": ["lm_head"]},
    "the embedding alone": {"peft_trainable_token_indices": NEW},
}


REFUSED = r"rows 400 to 401 of .* are new, and the adapter does not train them"


@pytest.mark.parametrize("case", UNTRAINED)
def test_rows_that_stay_as_they_are_are_refused(root, case):
    with pytest.raises(ValueError, match=REFUSED):
        go(root, **UNTRAINED[case])


def test_under_trl_they_are_refused_too(root):
    keys = {"trainer": "trl", "sample_packing": False, "step_mode": None, "tokens": None}
    keys["special_tokens"] = {"additional_special_tokens": ["<call>", "<done>"]}
    with pytest.raises(ValueError, match=REFUSED):
        go(root, lora_modules_to_save=["norm"], **keys)
    go(root, lora_modules_to_save=["embed_tokens", "lm_head"], **keys)


TRAINED = {
    "rows": {"peft_trainable_token_indices": {"embed_tokens": [5, *NEW], "lm_head": NEW}},
    "tables": {"lora_modules_to_save": ["embed_tokens", "lm_head", "norm"]},
    "LoRA": {"lora_target_modules": ["embed_tokens", "lm_head"], "lora_modules_to_save": ["norm"]},
}


@pytest.mark.parametrize("case", TRAINED)
def test_rows_that_are_trained_are_taken(root, case):
    go(root, **TRAINED[case])
    names = load_file(root / "out" / "adapter_model.safetensors")
    assert any("embed_tokens" in name for name in names)


def test_a_new_pad_token_needs_no_training(root):
    go(root, tokens=None, special_tokens={"pad_token": "<PAD2>"})


def test_a_pad_token_beyond_the_last_row_is_refused(root, tmp_path):
    make_tokenizer(tmp_path / "model")
    make_model(tmp_path / "model", vocab_size=400)
    keys = {"tokens": None, "special_tokens": {"pad_token": "<PAD2>"}, "base_model": str(tmp_path / "model")}
    with pytest.raises(ValueError, match="'<PAD2>' is not a token of the model, which has no row to spare"):
        go(root, **keys)
