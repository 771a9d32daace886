"""`monograph finetune` takes tokens of its own recipe alone, and every spelling that Python takes."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from monograph.__main__ import main
from support.native_tool import run
from support.two_trainers import Two, adapter, figures, make_world, recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return make_world(tmp_path_factory.mktemp("finetune"))


def refused(both: Two, tokens: pathlib.Path, **change: Any) -> str:
    command = ("finetune", both.config(**change), "--tokens", tokens, "--output-dir", both.folder / "no")
    return run(*command, code=3).stderr


def test_a_recipe_that_would_make_other_tokens_is_refused(
    world: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    both = Two(tmp_path, recipe(world, max_steps=2, special_tokens={"pad_token": "<pad>"}))
    shutil.copy(world / "train.jsonl", tmp_path / "other.jsonl")
    entry = both.keys["datasets"][0]
    for change, words in (
        ({"sequence_len": 100}, "sequence_len is '96' there and '100' here"),
        ({"train_on_inputs": True}, "train_on_inputs is missing there and 'true' here"),
        ({"min_sample_len": 2}, "min_sample_len is missing there and '2' here"),
        ({"excess_length_strategy": "drop"}, "excess_length_strategy is missing there and 'drop' here"),
        ({"chat_template": "chatml"}, "chat_template is missing there and 'chatml' here"),
        ({"tokenizer_config": str(world / "model")}, "tokenizer_config is missing there"),
        ({"eot_tokens": ["</s>"]}, "eot_tokens is missing there"),
        (
            {"special_tokens": {"pad_token": "</s>"}},
            "special_tokens.pad_token is '<pad>' there and '</s>' here",
        ),
        ({"special_tokens": None}, "special_tokens is "),
        ({"datasets": [entry | {"path": str(tmp_path / "other.jsonl")}]}, "datasets.0.path is "),
        (
            {"datasets": [entry | {"type": {"format": "{instruction}"}}]},
            "datasets.0.type is 'instruction' there",
        ),
        ({"datasets": [entry, dict(entry)]}, "datasets.1 is missing there"),
        ({"datasets": None}, "and missing here"),
    ):
        assert words in (said := refused(both, both.tokens, **change)), said
        assert "make the tokens anew with monograph preprocess" in said
    # What means the same is the same.
    both.keys |= {"train_on_inputs": False, "min_sample_len": None, "val_set_size": 0, "eot_tokens": []}
    both.keys["datasets"] = [entry | {"split_thinking": False, "field": None}]
    assert adapter(both.native("native")) == adapter(both.python("python"))


def test_tokens_of_another_split_or_tokenizer_are_refused(
    world: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    held_back = Two(tmp_path, recipe(world, val_set_size=5))
    assert "val_set_size is '5' there and missing here" in refused(
        held_back, held_back.tokens, val_set_size=0
    )
    both = Two(tmp_path, recipe(world, max_steps=1))
    other = shutil.copytree(world / "nf4", tmp_path / "other")
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + "\n")
    said = refused(both, both.tokens, base_model=str(other))
    assert "made with a tokenizer whose tokenizer.json has the hash" in said
    (other / "tokenizer.json").unlink()  # nothing to compare with
    assert adapter(both.native("native", base_model=str(other)))


def with_header(path: pathlib.Path, out: pathlib.Path, **change: Any) -> pathlib.Path:
    """The token file with another header; None takes an entry away."""
    with safe_open(path, "pt") as file:
        metadata = {name: value for name, value in (file.metadata() | change).items() if value is not None}
        save_file({name: file.get_tensor(name) for name in file.keys()}, out, metadata)  # noqa: SIM118
    return out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"recipe": None}, "has no recipe in its header, wanted a file of monograph preprocess --tokens"),
        ({"tokenizer": None}, "has no tokenizer in its header"),
        ({"recipe": "{"}, "recipe"),
        ({"recipe": "[]"}, "recipe in its header is no JSON object"),
        ({"recipe": '{"sequence_len": 96, "sequence_len": 1}'}, "sequence_len"),
        ({"recipe": "[" * 70 + "]" * 70}, "recipe"),
        ({"recipe": "{}"}, "datasets is missing there"),
        ({"recipe": '{"x": 1}'}, "x is '1' there and missing here"),
        ({"tokenizer": '{"new_tokens": 2}'}, "has 2 tokens that are new to the model"),
        ({"tokenizer": '{"new_tokens": -1}'}, "tokens that are new"),
        ({"tokenizer": '{"tokenizer.json": [1]}'}, "made with a tokenizer whose tokenizer.json"),
        ({"tokenizer": '{"tokenizer.json": ""}'}, "made with a tokenizer whose tokenizer.json"),
    ],
)
def test_hostile_headers_of_token_files(
    world: pathlib.Path, tmp_path: pathlib.Path, change: dict[str, Any], words: str
) -> None:
    both = Two(tmp_path, recipe(world))
    said = refused(both, with_header(both.tokens, tmp_path / "hostile.safetensors", **change))
    assert "hostile.safetensors" in said
    assert words in said


SPELLINGS = (
    """
adapter: 'qlora'   # a comment
load_in_4bit: yes
lora_target_modules: [q_proj, "k_proj", v_proj, o_proj, gate_proj, up_proj, down_proj]
lora_r: 4
lora_alpha: "8"
learning_rate: 1e-2
sample_packing: On
val_set_size: 0
tf32: false
flash_attention:
max_steps: 5
seed: 9007199254740992
shuffle_merged_datasets: off
weight_decay: 1e-2
bf16: full
""",
    """
adapter: qlora
lora_target_modules: model\\.layers\\.[\\d]+\\.(self_attn|mlp)\\.(q|up)_proj
lora_dropout: 1e-1
max_steps: -1
optimizer: adamw_bnb_8bit
lora_r: 1_0
learning_rate: '0.01'
micro_batch_size: 2
seed: 5_000_000_000
""",
    """
adapter: qlora
lora_target_modules: all-linear
special_tokens:
  pad_token: "<pad>"
max_steps: +4
gradient_checkpointing: unsloth
sample_packing: TRUE
attn_implementation: sdpa
warmup_steps: 2
""",
    """
adapter: qlora
lora_target_linear: true
lora_target_modules:
  - self_attn.q_proj
  - model.layers.1.mlp.up_proj
max_steps: 3
""",
    """
adapter: qlora
lora_target_modules: [model.layers.0.self_attn.v_proj, mlp.down_proj]
max_steps: 3
""",
)


@pytest.mark.parametrize("lines", SPELLINGS)
def test_other_spellings(world: pathlib.Path, tmp_path: pathlib.Path, lines: str) -> None:
    text = (
        f'base_model: "{world / "nf4"}"\ndatasets:\n- path: {world / "train.jsonl"}\n  type: instruction\n'
        f"dataset_prepared_path: {world / 'prepared'}\nsequence_len: 96\nstep_mode: eager\n"
        f"save_strategy: no\n{lines}"
    )
    (tmp_path / "r.yml").write_text(text)
    tokens, theirs, ours = (tmp_path / name for name in ("tokens", "python", "native"))
    assert main(["preprocess", str(tmp_path / "r.yml"), "--tokens", str(tokens), "--quiet"]) == 0
    assert main(["train", str(tmp_path / "r.yml"), "--output-dir", str(theirs), "--quiet"]) == 0
    run("finetune", tmp_path / "r.yml", "--tokens", tokens, "--output-dir", ours)
    assert adapter(ours) == adapter(theirs)
    assert figures(ours) == figures(theirs)
    targets = [json.loads((f / "adapter_config.json").read_text())["target_modules"] for f in (ours, theirs)]
    assert sorted(targets[0]) == sorted(targets[1])
