"""`adapters`, `sweep`, `sweep_stop` and `only` as they are read; what adapters cannot have is named."""

import json
import os

import pytest

from monograph.__main__ import main
from monograph.recipe import ConfigError, check_keys, read_config
from monograph.recipe.config.many_keys import OWN
from monograph.recipe.config.many_recipes import expand
from monograph.recipe.config.native_keys import KEYS
from monograph.recipe.run.sweep_table import report, table, write_record
from support.recipe_files import errors_of

TWO = [{"name": "law", "lora_r": 8}, {"name": "med", "learning_rate": "5e-4", "seed": 7}]


def test_each_adapter_is_a_recipe_with_its_own_folder(good):
    read = check_keys(good | {"adapters": TWO, "output_dir": "out", "lora_r": 4, "learning_rate": 1e-3})
    law, med = read.many.recipes["law"], read.many.recipes["med"]
    assert (law.lora_r, law.learning_rate, law.output_dir) == (8, 1e-3, os.path.join("out", "law"))
    assert (med.lora_r, med.learning_rate, med.seed) == (4, 5e-4, 7)
    assert (law.adapters, law.only) == ([], None)  # so that recipe.yml of its folder is one of one adapter
    assert read.many.output_dir == "out"


def test_only_is_the_recipe_of_that_adapter(good):
    keys = good | {"adapters": TWO}
    read = check_keys(keys | {"only": "med"})
    assert read.many is None
    assert read.recipe == check_keys(keys).many.recipes["med"]
    assert errors_of(keys | {"only": "tax"}) == ["only is 'tax', wanted one of law, med"]
    assert errors_of(good | {"only": "law"}) == [
        "only is 'law', and the recipe has neither adapters nor sweep"
    ]


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"learning_rate": ["2e-4", 0.001], "lora_r": [8, 32]},
         "lr2e-4-r8 lr2e-4-r32 lr0.001-r8 lr0.001-r32"),
        ({"learning_rate": [2e-4, 1.5e-5, 1]}, "lr2e-4 lr1.5e-5 lr1"),
        ({"peft_use_dora": [True, False], "seed": [1]}, "peft_use_doratrue-s1 peft_use_dorafalse-s1"),
        ({"lr_scheduler": ["cosine", "linear"], "lora_dropout": [0, 0.05]},
         "lr_schedulercosine-p0 lr_schedulercosine-p0.05 lr_schedulerlinear-p0 lr_schedulerlinear-p0.05"),
    ],
)  # fmt: skip
def test_a_sweep_is_the_product_with_names_made_of_values(good, values, names):
    assert list(check_keys(good | {"sweep": values}).many.recipes) == names.split()


def test_numbers_from_the_command_line_are_those_of_a_file(good, tmp_path):
    path = tmp_path / "r.yml"
    path.write_text(json.dumps(good))
    stop = ["--sweep_stop.after", "5", "--sweep_stop.metric", "loss"]
    read = read_config(str(path), ["--sweep.learning_rate", "[2e-4, 1e-3]", *stop], many=True)
    assert (read.many.stop.after, read.many.stop.keep) == (5, 1)
    assert list(read.many.recipes) == ["lr2e-4", "lr0.001"]
    assert [recipe.learning_rate for recipe in read.many.recipes.values()] == [2e-4, 1e-3]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"adapters": [{"lora_r": 8}]}, "adapters.0 has no name"),
        ({"adapters": ["law"]}, "adapters.0 is 'law', wanted `name` and keys"),
        ({"adapters": 5}, "adapters: 5, wanted a list"),
        ({"adapters": [TWO[0], {"name": "LAW"}]}, "adapters.1.name is 'LAW', which is written twice"),
        ({"adapters": [{"name": "a/b"}]}, "adapters.0.name is 'a/b', wanted letters, digits"),
        ({"adapters": [{"name": ".."}]}, "it names a folder"),
        ({"adapters": [{"name": "checkpoint-3"}]}, "the name of something else in output_dir"),
        ({"adapters": [{"name": "adapters.json.new"}]}, "the name of something else in output_dir"),
        ({"adapters": [TWO[0] | {"base_model": "x"}]}, "adapters.0.base_model: all adapters share it"),
        ({"adapters": [TWO[0] | {"step_mode": "eager"}]}, "adapters.0.step_mode: all adapters share it"),
        ({"adapters": [TWO[0] | {"rank": 8}]}, "adapters.0.rank: unknown key of an adapter"),
        ({"adapters": [TWO[0] | {"lora_modules_to_save": ["lm_head"]}]}, "trains tensors of the base"),
        ({"adapters": TWO, "lora_modules_to_save": ["lm_head"]}, "lora_modules_to_save: not with adapters"),
        ({"adapters": TWO, "peft_trainable_token_indices": [1]}, "peft_trainable_token_indices: not with"),
        ({"adapters": TWO, "tokens": ["<a>"]}, "tokens: not with adapters"),
        (
            {"adapters": TWO, "peft_init_lora_weights": "pissa"},
            "peft_init_lora_weights is pissa, which changes",
        ),
        ({"adapters": [TWO[0] | {"peft_init_lora_weights": "loftq"}]}, "peft_init_lora_weights is loftq"),
        ({"adapters": TWO, "base_memory": "1GiB"}, "base_memory: not with adapters"),
        ({"adapters": TWO, "shard_size": 2}, "shard_size: not with adapters"),
        ({"adapters": TWO, "merge_lora": True}, "merge_lora: not with adapters"),
        ({"adapters": TWO, "serve_with": "vllm"}, "serve_with: not with adapters"),
        ({"adapters": TWO, "rl": "dpo"}, "trainer: trl trains one adapter"),
        ({"adapters": TWO, "sweep": {"lora_r": [1]}}, "sweep: adapters are written too"),
        ({"sweep": {"lora_r": 8}}, "sweep.lora_r is 8, wanted a list"),
        ({"sweep": {"lora_r": [[8]]}}, "wanted a list of numbers or words"),
        ({"sweep": {"base_model": ["a", "b"]}}, "sweep.base_model: all adapters share it"),
        ({"sweep": {"lora_r": [8, 8]}}, "is the name of two"),
        ({"sweep": {"chat_template_jinja": ["{{ a }}"]}}, "is no name of a folder"),
        ({"sweep": {"seed": list(range(2000))}}, "sweep: 2000 adapters, wanted 1024 at most"),
        ({"adapters": TWO, "sweep_stop": {"after": 5}}, "nothing is held back"),
        ({"adapters": TWO, "sweep_stop": {"after": 5, "metric": "bleu"}}, "sweep_stop.metric is 'bleu'"),
        ({"adapters": TWO, "sweep_stop": {"metric": "loss"}}, "sweep_stop.after is None"),
        ({"adapters": TWO, "sweep_stop": {"metric": "loss", "after": 5, "keep": 3}}, "there are 2 adapters"),
        ({"sweep_stop": {"metric": "loss", "after": 5}}, "has neither adapters nor sweep"),
    ],
)
def test_what_is_wrong_is_named(good, keys, message):
    assert message in "\n".join(errors_of(good | keys))


def test_a_mistake_of_one_names_it_and_a_mistake_of_all_is_said_once(good):
    keys = good | {"adapters": [*TWO, {"name": "tax", "lora_r": 0}], "weight_decay": "much"}
    found = errors_of(keys)
    assert [error for error in found if "weight_decay" in error] == [
        "weight_decay is 'much' (str), wanted a number"
    ]
    assert "adapter tax: lora_r is 0, wanted 1 or more" in found


def test_keys_of_an_adapter_are_keys_and_none_is_of_the_base():
    assert set(KEYS) >= OWN
    of_base = {
        "base_model",
        "adapter",
        "bf16",
        "load_in_4bit",
        "device",
        "step_mode",
        "output_dir",
        "providers",
    }
    assert not OWN & of_base


def test_expanding_changes_nothing_of_what_was_written(good):
    keys = good | {"adapters": TWO}
    before = json.dumps(keys)
    expand(keys)
    assert json.dumps(keys) == before


@pytest.mark.parametrize("command", ["preprocess", "generate", "merge"])
def test_other_commands_want_one_of_them(good, tmp_path, command, capsys):
    path = tmp_path / "r.yml"
    path.write_text(json.dumps(good | {"adapters": TWO}))
    assert main([command, str(path)]) == 2
    assert "adapters: this takes one of them; write --only with one of law, med" in capsys.readouterr().err


def test_a_report_of_hostile_metrics_puts_what_is_no_number_last(tmp_path):
    lines = {
        "good": [{"step": 1, "loss": 2.0}, {"step": 1, "eval_loss": 1.5}, {"step": 2, "eval_loss": 1.75}],
        "nan": [{"step": 1, "loss": float("nan")}, {"step": 1, "eval_loss": float("nan")}],
        "plain": [{"step": 1, "loss": 0.5}],
        "skipped": [{"step": 3, "skipped_steps": 3}],
        "none": [],
    }
    for name, written in lines.items():
        (tmp_path / name).mkdir()
        text = "".join(json.dumps(line) + "\n" for line in written)
        (tmp_path / name / "metrics.jsonl").write_text(text + '{"step": 9, "lo')  # killed in the middle
    write_record(str(tmp_path), dict.fromkeys([*lines, "gone"], "done"), {})
    rows = report(str(tmp_path))
    assert [row.name for row in rows[:2]] == ["good", "plain"]
    assert (rows[0].eval_loss, rows[0].best_step, rows[0].step) == (1.5, 1, 2)
    assert {row.name for row in rows} == set(lines)
    assert len(table(rows).splitlines()) == 6


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("adapters.json", "{", "adapters.json is no JSON: "),
        ("adapters.json", "[" * 100_000, "adapters.json is no JSON: "),
        (
            "adapters.json",
            "[1, 2]",
            "adapters.json: adapters is [1, 2], wanted names of adapters with a word",
        ),
        ("adapters.json", '{"adapters": ["law"]}', "adapters is ['law'], wanted names"),
        ("adapters.json", '{"adapters": {"law": 5}}', "adapters is {'law': 5}, wanted names"),
        ("adapters.json", '{"ended": {"law": "5"}}', "ended is {'law': '5'}, wanted names"),
        ("adapters.json", '{"adapters": {"../law": "done"}}', "has '../law', wanted names of folders beside"),
        ("adapters.json", '{"adapters": {"": "done"}}', "has '', wanted names of folders beside"),
        ("law/metrics.jsonl", "[1, 2]\n", "line 1 is [1, 2], wanted an object with a whole step"),
        (
            "law/metrics.jsonl",
            '{"loss": 2.0}\n',
            "line 1 is {'loss': 2.0}, wanted an object with a whole step",
        ),
        ("law/metrics.jsonl", '{"step": 1, "loss": "two"}\n', "loss in line 1 is 'two', wanted a number"),
        ("law/metrics.jsonl", '{"step": 1, "eval_loss": true}\n', "eval_loss in line 1 is True"),
        ("law/metrics.jsonl", '{"step": 1, "skipped_steps": "3"}\n', "skipped_steps in line 1 is '3'"),
        ("law/metrics.jsonl", "{" * 9 + "\n", "metrics.jsonl is no file of JSON lines: "),
    ],
)
def test_a_report_names_the_file_that_is_broken(tmp_path, capsys, file, text, message):
    (tmp_path / "law").mkdir()
    (tmp_path / "law" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (tmp_path / file).write_text(text)
    assert main(["sweep-report", str(tmp_path)]) == 3
    said = capsys.readouterr().err
    assert message in said
    assert str(tmp_path / file) in said


def test_a_report_as_json_is_json(tmp_path, capsys):
    (tmp_path / "law").mkdir()
    (tmp_path / "law" / "metrics.jsonl").write_text('{"step": 1, "loss": Infinity}\n')
    assert main(["sweep-report", str(tmp_path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["adapters"]
    assert (row["step"], row["loss"]) == (1, None)


def test_a_folder_without_adapters_is_told(tmp_path, capsys):
    assert main(["sweep-report", str(tmp_path)]) == 3
    assert "has no adapter's folder with metrics.jsonl" in capsys.readouterr().err
    assert main(["sweep-report", str(tmp_path / "none")]) == 3
    with pytest.raises(SystemExit):
        main(["sweep-report"])


def test_config_errors_are_of_one_kind(good):
    with pytest.raises(ConfigError):
        check_keys(good | {"adapters": [{"name": "law", "lora_r": "eight"}]})
