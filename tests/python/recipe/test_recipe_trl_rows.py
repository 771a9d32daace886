"""Rows of preference datasets: axolotl's types in TRL's columns, and what is wrong with a row by name."""

import os
import pathlib
import sys

import pytest
import yaml

from monograph.__main__ import main
from monograph.recipe import ConfigError, check_keys, read_config
from monograph.recipe.data.documents import Prompt
from monograph.recipe.data.new_tokens import add_tokens
from monograph.recipe.data.preference_rows import prompt_wording
from monograph.recipe.trl.datasets import make_datasets
from monograph.recipe.trl.import_path import import_path, reward_functions
from support.trl_recipes import TEMPLATE, trl_keys, write_rows
from support.trl_runs import tokenizer


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def rows_of(tmp_path):
    """Writes a file and reads it back as TRL would be given it."""
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")

    def recipe(columns, kind, entry=None, **keys):
        path = write_rows(tmp_path / "rows.jsonl", **columns)
        chats = {"chat_template": "jinja", "chat_template_jinja": TEMPLATE}
        written = trl_keys(tmp_path / "model", tmp_path, path, kind, **chats | keys)
        written["datasets"][0] |= entry or {}
        return check_keys(written).recipe

    def made(columns, kind, entry=None, **keys):
        return list(make_datasets(recipe(columns, kind, entry, **keys), tokenizer()).train)

    made.recipe = recipe
    return made


def test_answers_are_texts_messages_or_chats(rows_of):
    columns = {
        "talk": [[{"from": "human", "value": "w1"}]] * 2,
        "good": [
            [{"from": "gpt", "value": "w2"}],
            [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}],
        ],
        "bad": ["w3", "w3"],
    }
    entry = {
        "field_messages": "talk",
        "field_chosen": "good",
        "field_rejected": "bad",
        "message_property_mappings": {"role": "from", "content": "value"},
    }
    want = {"prompt": [user("w1")], "chosen": [assistant("w2")], "rejected": [assistant("w3")]}
    assert rows_of(columns, "chat_template.default", entry, rl="dpo") == [want, want]


def test_two_chats_share_their_prompt(rows_of):
    columns = {"chosen": [[user("w1"), assistant("w2")]], "rejected": [[user("w1"), assistant("w3")]]}
    want = {"prompt": [user("w1")], "chosen": [assistant("w2")], "rejected": [assistant("w3")]}
    for kind, rl in (("chat_template.argilla_chat", "dpo"), ("chat_template.argilla", "orpo")):
        assert rows_of(columns, kind, rl=rl, pad_to_sequence_len=None) == [want]
    columns["rejected"][0][0] = user("w9")
    with pytest.raises(ValueError, match="row 0: chosen and rejected differ before their last message"):
        rows_of(columns, "chat_template.argilla_chat", rl="dpo")


def test_a_mapping_words_texts_and_braces_stay(rows_of):
    columns = {"system": ["S{prompt}"], "prompt": ["P{system}"], "chosen": ["C"], "rejected": ["R"]}
    kind = {"prompt_format": "<{system}|{prompt}>", "chosen_format": "{chosen}!"}
    want = {"prompt": "<S{prompt}|P{system}>", "chosen": "C!", "rejected": "R"}
    assert rows_of(columns, kind, rl="dpo") == [want]
    assert prompt_wording({"prompt_format": "Q: {prompt}"}) == Prompt("Q: {instruction}", "Q: {instruction}")


def test_rows_of_reward_models_and_kto(rows_of):
    columns = {"system": ["w0"], "input": ["w1"], "chosen": ["w2"], "rejected": ["w3"]}
    (row,) = rows_of(columns, "bradley_terry.chat_template", reward_model=True)
    assert row["prompt"] == [{"role": "system", "content": "w0"}, user("w1")]
    assert (row["chosen"], row["rejected"]) == ([assistant("w2")], [assistant("w3")])
    columns = {"messages": [[user("w1")]], "completion": ["w2"], "label": [True]}
    want = {"prompt": [user("w1")], "completion": [assistant("w2")], "label": True}
    assert rows_of(columns, "chat_template.default", rl="kto") == [want]
    with pytest.raises(ValueError, match="column 'label' is 1, wanted true or false"):
        rows_of(columns | {"label": [1]}, "chat_template.default", rl="kto")


def test_prompts_keep_their_columns_and_a_function_may_make_them(rows_of, tmp_path, monkeypatch):
    reward = {"rl": "grpo", "trl": {"reward_funcs": ["support.trl_recipes.rewards_high"]}}
    columns = {"prompt": [[user("w1")], [user("w1 " * 20)]], "answer": ["w7", "w8"]}
    assert rows_of(columns, "chat_template", **reward) == [{"prompt": [user("w1")], "answer": "w7"}]
    source = """
def worded(cfg, *_, **__):
    def one(row, tokenizer=None):
        return {"prompt": f"{row['q']} {cfg['seed']} {tokenizer.eos_token}"}
    return one, {"remove_columns": ["q"]}
"""
    (tmp_path / "my_rows.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert rows_of({"q": ["w1"]}, "my_rows.worded", **reward) == [{"prompt": "w1 3 <eos>"}]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"messages": [[user("a")]], "chosen": ["b"]}, "column 'rejected' is missing or empty; the row has"),
        (
            {"messages": [[assistant("a")]], "chosen": ["b"], "rejected": ["c"]},
            "last message is of assistant",
        ),
        (
            {"messages": [[user("a")]], "chosen": [[user("x"), assistant("b")]], "rejected": ["c"]},
            "row 0: chosen is a chat that does not go on from the prompt",
        ),
        (
            {
                "messages": [[user("a")]],
                "chosen": [assistant("b") | {"reasoning_content": "r"}],
                "rejected": ["c"],
            },
            "has reasoning_content; preference data take role and content",
        ),
    ],
)
def test_a_wrong_row_is_named(columns, message, rows_of):
    with pytest.raises(ValueError, match=message):
        rows_of(columns, "chat_template.default", rl="dpo")


def test_a_template_that_ends_no_answer_is_refused(rows_of):
    columns = {"messages": [[user("a")]], "chosen": ["b"], "rejected": ["c"]}
    endless = {"chat_template_jinja": TEMPLATE.replace("<eos>", "")}
    with pytest.raises(ValueError, match="nothing ends the assistant's turn"):
        rows_of(columns, "chat_template.default", rl="dpo", **endless)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("alpaca", "datasets.0.type is 'alpaca', wanted one of chat_template.default"),
        ("llama3.ultra", "wordings without the model's template are not shipped"),
        ({"field_answer": "a"}, "datasets.0.type.field_answer: unknown key; allowed are field_system"),
    ],
)
def test_a_wrong_type_is_refused_when_the_recipe_is_read(kind, message, rows_of):
    with pytest.raises(ConfigError, match=message):
        rows_of({"a": ["b"]}, kind, rl="dpo")


UNREAD = {
    "train_on_eos": "none",
    "roles_to_train": ["user"],
    "message_field_training": "t",
    "field": "x",
    "field_tools": "t",
    "split_thinking": True,
    "field_thinking": "t",
    "template_thinking_key": "t",
}


@pytest.mark.parametrize(
    ("kind", "method", "unread"),
    [
        ("chat_template.default", {"rl": "dpo"}, {**UNREAD, "field_label": "l", "field_completion": "c"}),
        ("chat_template", {"rl": "kto"}, {"train_on_eos": "none", "field_chosen": "c"}),
        ("chat_template.argilla", {"rl": "orpo"}, {"field_messages": "m", "roles_to_train": ["user"]}),
        ("bradley_terry.chat_template", {"reward_model": True}, {"field_chosen": "c", "field": "x"}),
        ("passthrough", {"rl": "simpo"}, {"field_chosen": "c", "chat_template": "chatml"}),
        ({"field_prompt": "q"}, {"rl": "dpo"}, {"field_chosen": "c", "drop_system_message": True}),
        ("chat_template", {"rl": "grpo", "trl": {"reward_funcs": ["a.b"]}}, {"field_chosen": "c"}),
    ],
)
def test_a_key_that_the_type_does_not_read_is_refused(kind, method, unread, rows_of, tmp_path):
    keys = trl_keys(tmp_path / "model", tmp_path, "a", kind, **method)
    for name in ("pad_to_sequence_len", "sequence_len"):
        keys.pop(name)
    check_keys(keys)
    held = keys | {"test_datasets": [keys["datasets"][0] | unread]}
    keys["datasets"][0] = keys["datasets"][0] | unread
    said = "a mapping" if isinstance(kind, dict) else kind
    for where, written in (("datasets", keys), ("test_datasets", held)):
        with pytest.raises(ConfigError) as caught:
            check_keys(written)
        found = {error.split(";")[0] for error in caught.value.errors if error.startswith(where)}
        assert found == {f"{where}.0.{name}: type {said} does not read it" for name in unread}


def test_a_function_is_given_every_key_of_its_dataset(rows_of, tmp_path):
    keys = trl_keys(tmp_path / "model", tmp_path, "a", "my_rows.worded", rl="dpo")
    keys["datasets"][0] |= UNREAD
    check_keys(keys)


def test_a_new_token_is_refused_with_what_can_be_done(rows_of):
    columns = {"messages": [[user("a")]], "chosen": ["b"], "rejected": ["c"]}
    new = {"special_tokens": {"additional_special_tokens": ["<zz>"]}}

    def said(**keys):
        recipe = rows_of.recipe(columns, "chat_template", **keys, **new)
        with pytest.raises(ValueError, match="'<zz>' is not a token of the model") as caught:
            add_tokens(recipe, tokenizer())
        assert "peft_trainable_token_indices" not in str(caught.value)
        return str(caught.value)

    assert "leave trainer out, or add the tokens to the folder of the model first" in said(trainer="trl")
    assert "leave trainer out" not in said(rl="dpo")


def test_names_of_rewards_are_looked_up(rows_of, tmp_path):
    def functions(name):
        keys = trl_keys(tmp_path / "model", tmp_path, "a", "passthrough", rl="grpo")
        return reward_functions(check_keys(keys | {"trl": {"reward_funcs": [name]}}).recipe)

    assert functions("support.trl_recipes.rewards_high")[0] is sys.modules["support.trl_recipes"].rewards_high
    assert functions(str(tmp_path / "model")) == [str(tmp_path / "model")]
    for name, message in {
        "no_such.reward": r"trl.reward_funcs: there is no module no_such \(for no_such.reward\) in ",
        "support.trl_recipes.rewards_low": "trl.reward_funcs: support.trl_recipes .* has no rewards_low",
        "reward": "'reward' is no dotted name; wanted module.function",
        "support.trl_recipes.PROMPTS": "trl_recipes.PROMPTS is list, wanted a function",
        "os.path.join": "takes no completions; wanted join",
    }.items():
        with pytest.raises(ValueError, match=message):
            functions(name)
    assert import_path("os.path.join", "callbacks") is os.path.join


def test_a_module_in_the_working_folder_is_found_however_python_was_started(tmp_path, monkeypatch):
    """`python -m` puts that folder into the path, a script and pytest do not."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", os.getcwd())])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards_beside.py").write_text("def short(completions, **columns):\n    return []\n")
    try:
        assert import_path("rewards_beside.short", "trl.reward_funcs")(completions=[]) == []
    finally:
        sys.modules.pop("rewards_beside", None)


def test_preprocess_shows_rows(rows_of, tmp_path, capsys):
    path = write_rows(tmp_path / "rows.jsonl", prompt=["w1 "], chosen=["w2"], rejected=["w3"])
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(yaml.safe_dump(trl_keys(tmp_path / "model", tmp_path, path, {}, rl="ipo")))
    assert main(["preprocess", str(recipe), "--debug"]) == 0
    said = capsys.readouterr().out
    assert '{"prompt": "w1 ", "chosen": "w2", "rejected": "w3"}' in said
    assert "train rows" in said


@pytest.mark.parametrize("name", ["qlora", "dpo", "grpo"])
def test_examples_are_right(name, rows_of, tmp_path):
    path = pathlib.Path(__file__).parents[3] / "examples" / f"{name}.yml"
    assert read_config(str(path), ["--base-model", str(tmp_path / "model")]).recipe.adapter == "qlora"
