"""All that is wrong with a recipe is said at once, and keys that a type of dataset does not read are."""

import pytest

from monograph.recipe import check_keys
from support.recipe_files import errors_of, small_recipe


@pytest.fixture
def good(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return small_recipe(tmp_path, "alpaca")


def test_mistakes_of_every_check_come_at_once(good):
    """A misspelt key, a wrong type, a refused value, keys together, a dataset, options of the compiler."""
    wrong = {
        "lerning_rate": 1,
        "seed": "x",
        "load_in_8bit": True,
        "warmup_ratio": 2.0,
        "optimizer": "lion",
        "device_map": "balanced",
        "shard_size": 0,
        "torch_compile_options": {"shape_padding": True},
        "datasets": [{"path": "a.jsonl", "type": "alpaca", "roles_to_train": ["user"], "shards_idx": 1}],
    }
    found = errors_of(good | wrong)
    for begins in (
        "lerning_rate: unknown key; did you mean learning_rate?",
        "seed is 'x' (str), wanted a whole number",
        "adapter is qlora and load_in_8bit true",
        "warmup_ratio is 2.0, wanted",
        "optimizer is lion, only AdamW",
        "device_map is balanced",
        "shard_size is 0, wanted 1 or more",
        "torch_compile_options: torch_compile is missing",
        "datasets.0.roles_to_train: type alpaca does not read it",
        "datasets.0.shards_idx is 1 without shards",
    ):
        assert [error for error in found if error.startswith(begins)], (begins, found)
    assert len(found) == 10


def test_a_key_with_a_mistake_is_named_once(good):
    """Its value is lost, so what other rules would say of its default is left out."""
    assert errors_of(good | {"adapter": "qlra"}) == ["adapter is 'qlra' (str), wanted qlora, lora or empty"]
    misspelt = {name: value for name, value in good.items() if name != "adapter"} | {"adaptr": "qlora"}
    assert errors_of(misspelt) == ["adaptr: unknown key; did you mean adapter?"]
    assert len(errors_of(good | {"datasets": "train.jsonl"})) == 1
    assert len(errors_of(good | {"datasets": [{"path": "a.jsonl", "type": 3}]})) == 1
    assert len(errors_of(good | {"rl": "dpp", "datasets": [{"path": "a", "type": "chatml.intel"}]})) == 1


def test_the_checks_of_trl_come_with_the_others(good):
    wrong = {"trainer": "trl", "seed": "x", "fp16": True, "bf16": False, "max_bad_steps": 2}
    found = errors_of(good | wrong)
    assert len(found) == 3
    assert any(error.startswith("fp16: accelerate scales no loss") for error in found)
    assert any(error.startswith("max_bad_steps: trainer is trl") for error in found)


CHAT_KEYS = {
    "field_messages": "conv",
    "roles_to_train": ["user"],
    "train_on_eos": "none",
    "message_field_training": "t",
    "drop_system_message": True,
    "chat_template": "chatml",
}


@pytest.mark.parametrize(
    ("kind", "unread"),
    [
        ("alpaca", CHAT_KEYS | {"field": "a"}),
        ("instruction", CHAT_KEYS | {"field": "a"}),
        ("completion", CHAT_KEYS),
        ("input_output", CHAT_KEYS | {"field": "a"}),
        ({"field_instruction": "a"}, CHAT_KEYS | {"field": "a"}),
        ("chat_template", {"field": "a"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("trainer", ["monograph", "trl"])
def test_keys_that_a_type_does_not_read_are_refused(good, kind, unread, trainer):
    for name, value in unread.items():
        (said,) = errors_of(
            good | {"trainer": trainer, "datasets": [{"path": "a.jsonl", "type": kind, name: value}]}
        )
        assert said.startswith(f"datasets.0.{name}: type ")
        assert "does not read it; leave it out" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"chat_template": "chatml"}, "chat_template: no dataset is of chats"),
        ({"default_system_message": "be kind"}, "default_system_message: no dataset is of chats"),
        ({"eot_tokens": ["</s>"]}, "eot_tokens: no dataset is of chats"),
        ({"eval_sample_packing": False}, "eval_sample_packing: ignored; nothing is evaluated"),
        (
            {"train_on_inputs": True, "datasets": [{"path": "a.jsonl", "type": "completion"}]},
            "train_on_inputs: ignored; type completion says itself what is a target",
        ),
    ],
)
def test_keys_that_no_dataset_reads_are_noticed(good, change, said):
    assert [notice for notice in check_keys(good | change).notices if notice.startswith(said)]


def test_a_template_that_is_not_taken_is_refused(good):
    written = {"chat_template": "chatml", "chat_template_jinja": "{{ messages }}"}
    (said,) = errors_of(good | written)
    assert said.startswith("chat_template_jinja: chat_template is chatml, so it would do nothing")
    entry = {"path": "a.jsonl", "type": "chat_template", "chat_template": "jinja"}
    (said,) = errors_of(good | {"datasets": [entry]})
    assert said.startswith("datasets.0.chat_template is jinja and chat_template_jinja is missing")
