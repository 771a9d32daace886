"""Recipes with `rl` and `reward_model`: the losses of plain TRL scripts, one graph, and a task learnt."""

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from support.trl_recipes import (
    ANSWERS,
    CHAT_ROWS,
    GRPO,
    LABELLED,
    OTHERS,
    PROMPTS,
    TEMPLATE,
    answered,
    asked,
    classifier,
    columns,
    counted_graphs,
    run_recipe,
    run_script,
    trl_keys,
    write_rows,
)
from support.trl_runs import make_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("tiny"), layers=1)


@pytest.fixture(autouse=True)
def no_compilation_left(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # the arguments write it; undone after the test


CHATS = {"chat_template": "jinja", "chat_template_jinja": TEMPLATE}


def keys_of(kind, folder, root, **change):
    if kind == "grpo":
        path = write_rows(root / "rows.jsonl", prompt=PROMPTS)
        rewards = GRPO | {"reward_funcs": ["support.trl_recipes.rewards_high"]}
        change = {"micro_batch_size": 16, "learning_rate": 0.03} | change
        return trl_keys(folder, root, path, "passthrough", rl="grpo", trl=rewards, **change)
    if kind == "kto":
        columns_of = {"question": PROMPTS, "answer": LABELLED["completion"], "good": LABELLED["label"]}
        path = write_rows(root / "rows.jsonl", **columns_of)
        kind_of_rows = {
            "field_prompt": "question",
            "field_completion": "answer",
            "field_label": "good",
            "prompt_format": "{prompt} ",
        }
        return trl_keys(folder, root, path, kind_of_rows, rl="kto", rl_beta=0.5, **change)
    path = write_rows(root / "rows.jsonl", messages=asked(PROMPTS), chosen=ANSWERS, rejected=answered(OTHERS))
    method = {"reward_model": True} if kind == "reward_model" else {"rl": kind}
    if kind in ("orpo", "simpo"):
        change = {"pad_to_sequence_len": None} | change
    return trl_keys(folder, root, path, "chat_template.default", **method, **CHATS, **change)


# Rows for the script and its own settings; what is compared; what shows that a task was learnt.
SCRIPTS = {
    "dpo": (CHAT_ROWS, {"beta": 0.1}, ("loss", "grad_norm", "rewards/margins")),
    "kto": (LABELLED, {"beta": 0.5}, ("loss", "grad_norm")),
    "grpo": (
        {"prompt": PROMPTS},
        GRPO | {"per_device_train_batch_size": 16, "learning_rate": 0.03},
        ("loss", "grad_norm", "reward"),
    ),
    "reward_model": (CHAT_ROWS, {}, ("loss", "grad_norm", "accuracy")),
    "orpo": (CHAT_ROWS, {}, ("loss", "grad_norm")),
    "simpo": (CHAT_ROWS, {"loss_type": "simpo"}, ("loss", "grad_norm")),
}


def mean_reward(lines):
    return sum(line["reward"] for line in lines) / len(lines)


LEARNT = {
    "dpo": lambda first, last: last["loss"] < 0.2 < 0.6 < first["loss"],
    "kto": lambda first, last: last["loss"] < 0.6 * first["loss"],
    "grpo": lambda first, last: mean_reward(last) > mean_reward(first) + 0.2,
    "reward_model": lambda first, last: last["loss"] < 0.3 * first["loss"],
    "orpo": lambda first, last: last["loss"] < 0.7 * first["loss"],
    "simpo": lambda first, last: last["loss"] < 0.7 * first["loss"],
}


@pytest.mark.parametrize("kind", SCRIPTS)
def test_losses_are_those_of_the_script_and_a_task_is_learnt(kind, folder, tmp_path):
    rows, settings, compared = SCRIPTS[kind]
    ours = run_recipe(keys_of(kind, folder, tmp_path, max_steps=28 if kind == "grpo" else 12))
    load = {"load": classifier} if kind == "reward_model" else {}
    script = run_script(kind, folder, tmp_path, rows, max_steps=4, **settings, **load)
    assert columns(ours[:4], *compared) == columns(script, *compared)
    first, last = (ours[:5], ours[-5:]) if kind == "grpo" else (ours[0], ours[-1])
    assert LEARNT[kind](first, last)


@pytest.mark.parametrize(("kind", "graphs"), [("dpo", 1), ("kto", 2), ("grpo", 1)])
def test_a_step_is_one_graph(kind, graphs, folder, tmp_path):
    """KTO: TRL runs its KL term through the compiled model without gradients, which is a graph of its own."""
    keys = keys_of(kind, folder, tmp_path, max_steps=3, torch_compile=True, torch_compile_backend="eager")
    with counted_graphs(counters, torch._dynamo) as found:
        run_recipe(keys)
    assert found == {"graphs": graphs, "breaks": 0}
