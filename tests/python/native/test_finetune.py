"""`monograph finetune` writes what `monograph train` writes; either goes on from the other's checkpoint."""

from __future__ import annotations

import json
import pathlib
import random
import re
import shutil
import signal
import subprocess
import time
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import monograph as mg
from monograph.__main__ import main
from monograph.recipe.run.base_fingerprint import base_sha256
from monograph.recipe.run.output_folder import held
from support.native_steps import ATTENTION, MIXTURE, STACKED, make_base
from support.native_tool import program, run
from support.two_trainers import Two, adapter, figures, make_world, recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return make_world(tmp_path_factory.mktemp("finetune"))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"micro_batch_size": 2, "gradient_accumulation_steps": 3, "lora_dropout": 0.1, "seed": 3},
        {"sample_packing": False, "micro_batch_size": 3, "lr_scheduler": "linear", "bf16": False},
        {
            "sample_packing": False,
            "pad_to_sequence_len": True,
            "gradient_accumulation_steps": 2,
            "num_epochs": 0.7,
        },
        {
            "shuffle_merged_datasets": False,
            "lora_target_linear": None,
            "lora_target_modules": ["q_proj", "up_proj"],
        },
        {
            "gradient_checkpointing": True,
            "lr_scheduler": "rex",
            "peft_use_rslora": True,
            "virtual_shards": 2,
            "gradient_accumulation_steps": 5,
            "adam_beta2": 0.95,
            "max_grad_norm": 0.1,
            "logging_steps": 3,
        },
    ],
)
def test_the_same_adapter(world: pathlib.Path, tmp_path: pathlib.Path, change: dict[str, Any]) -> None:
    both = Two(tmp_path, recipe(world, **change))
    theirs, ours = both.python("python"), both.native("native")
    assert adapter(ours) == adapter(theirs)
    assert figures(ours) == figures(theirs)
    written, wanted = (json.loads((f / "adapter_config.json").read_text()) for f in (ours, theirs))
    written["target_modules"].sort()
    wanted["target_modules"].sort()
    del wanted["peft_version"]  # no PEFT wrote ours
    assert written == wanted


def test_another_format_and_mode(world: pathlib.Path, tmp_path: pathlib.Path) -> None:
    keys = recipe(world, base_model=str(world / "mxfp4"), step_mode="graph", lora_dropout=0.05)
    both = Two(tmp_path, keys)
    assert adapter(both.native("native")) == adapter(both.python("python"))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("mistral", {"sliding_window": 20}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("gemma3_text", {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
def test_families_in_one_graph(
    world: pathlib.Path, tmp_path: pathlib.Path, family: str, changes: dict[str, Any]
) -> None:
    base = make_base(tmp_path, family, ("nf4", "--double-quant"), torch.bfloat16, vocab_size=400, **changes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(world / "model" / name, base)
    keys = {"base_model": str(base), "step_mode": "graph", "max_steps": 20, "num_epochs": 20}
    both = Two(tmp_path, recipe(world, gradient_accumulation_steps=2, **keys))
    theirs, ours = both.python("python"), both.native("native")
    assert adapter(ours) == adapter(theirs)
    assert figures(ours) == figures(theirs)
    assert len(figures(ours)) == 20


def with_experts(world: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    base = make_base(folder, "qwen3_moe", STACKED, torch.bfloat16, vocab_size=400, **MIXTURE)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(world / "model" / name, base)
    return base


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_mixture_of_experts(world: pathlib.Path, tmp_path: pathlib.Path, mode: str) -> None:
    keys = {
        "base_model": str(with_experts(world, tmp_path)),
        "lora_target_linear": None,
        "lora_target_modules": ATTENTION,
        "step_mode": mode,
        "lora_dropout": 0.1,
    }
    both = Two(tmp_path, recipe(world, gradient_accumulation_steps=2, **keys))
    theirs, ours = both.python("python"), both.native("native")
    assert adapter(ours) == adapter(theirs)
    assert figures(ours) == figures(theirs)


def test_lora_on_experts_is_refused_by_name(world: pathlib.Path, tmp_path: pathlib.Path) -> None:
    both = Two(tmp_path, recipe(world, base_model=str(with_experts(world, tmp_path))))
    for change, said in (
        ({}, "lora_target_linear: true takes the experts, and LoRA on the experts of qwen3_moe is not"),
        ({"lora_target_modules": ["gate_proj"]}, "lora_target_modules: gate_proj may take the experts"),
        ({"lora_target_modules": ".*q_proj"}, "lora_target_modules: .*q_proj may take the experts"),
    ):
        linear = {"lora_target_linear": None} if change else {}
        config = both.config(**linear, **change)
        done = run("finetune", config, "--tokens", both.tokens, "--output-dir", tmp_path / "out", code=3)
        assert said in done.stderr
    config = both.config(
        lora_target_linear=None,
        lora_target_modules=ATTENTION,
        lora_target_parameters=["mlp.experts.down_proj"],
    )
    done = run("finetune", config, "--tokens", both.tokens, "--output-dir", tmp_path / "out", code=2)
    assert "lora_target_parameters" in done.stderr


def test_either_goes_on_from_the_other(world: pathlib.Path, tmp_path: pathlib.Path) -> None:
    keys = recipe(world, save_strategy="steps", save_steps=4, lora_dropout=0.1)
    both = Two(tmp_path, keys)
    whole_python, whole_native = both.python("python"), both.native("native")
    assert adapter(whole_native) == adapter(whole_python)
    for step in (4, 8):
        theirs, ours = (
            load_file(f / f"checkpoint-{step}" / "optimizer.safetensors")
            for f in (whole_python, whole_native)
        )
        assert theirs.keys() == ours.keys()
        assert all(theirs[name].equal(ours[name]) for name in theirs)
    shutil.copytree(whole_python / "checkpoint-4", tmp_path / "a" / "checkpoint-4")
    shutil.copytree(whole_native / "checkpoint-4", tmp_path / "b" / "checkpoint-4")
    ours = both.native("a", resume_from_checkpoint="auto")
    theirs = both.python("b", resume_from_checkpoint="auto")
    assert adapter(ours) == adapter(theirs) == adapter(whole_python)
    assert figures(whole_native)[4:] == figures(ours)
    # A checkpoint of our own.
    for folder in whole_native.glob("checkpoint-8"):
        shutil.rmtree(folder)
    assert adapter(both.native("native", auto_resume_from_checkpoints=True)) == adapter(whole_python)
    assert figures(whole_native) == figures(whole_python)


def test_either_trainer_refuses_another_config_of_the_same_tensors(
    world: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    shutil.copytree(world / "nf4", base)
    both = Two(
        tmp_path, recipe(world, base_model=str(base), save_steps=2, save_strategy="steps", max_steps=2)
    )
    both.native("out")
    (base / "config.json").write_text((base / "config.json").read_text() + " ")
    config = both.config(resume_from_checkpoint="auto", max_steps=4)
    done = run("finetune", config, "--tokens", both.tokens, "--output-dir", tmp_path / "out", code=3)
    assert "resume_from_checkpoint: config.json of base_model is" in done.stderr
    theirs = both.config(resume_from_checkpoint="auto", max_steps=4, output_dir=str(tmp_path / "out"))
    assert main(["train", theirs, "--quiet"]) != 0
    assert "config.json of base_model is" in capsys.readouterr().err


def test_a_checkpoint_of_another_run_is_refused(world: pathlib.Path, tmp_path: pathlib.Path) -> None:
    both = Two(tmp_path, recipe(world, save_steps=2, save_strategy="steps", max_steps=2))
    both.native("out")
    again = {"resume_from_checkpoint": "auto", "max_steps": 4}
    for change, words in (
        ({"seed": 5}, "seed is 5"),
        ({"weight_decay": 0.5}, "weight_decay is 0.5"),
        ({"base_model": str(world / "mxfp4")}, "the base's hash is"),
        ({"lora_r": 8}, "lora_r is 8"),
    ):
        config = both.config(**(again | change))
        done = run("finetune", config, "--tokens", both.tokens, "--output-dir", tmp_path / "out", code=3)
        assert f"resume_from_checkpoint: {words}" in done.stderr
    assert len(figures(both.native("out", **again))) == 4


CHANGED = {"learning_rate": 0.005, "max_steps": 4, "num_epochs": 2, "lr_scheduler": "linear"}
CHANGED |= {"warmup_ratio": 0.2, "pad_to_sequence_len": True, "step_mode": "graph"}


def test_what_a_resumed_run_does_in_another_way_is_told(
    world: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the same words, whoever made the checkpoint and whoever goes on."""
    keys = {"save_steps": 2, "save_strategy": "steps", "sample_packing": False}
    both = Two(tmp_path, recipe(world, **keys, max_steps=2))
    begun = {"native": both.native("native"), "python": both.python("python")}
    saved = [
        json.loads((folder / "checkpoint-2" / "trainer_state.json").read_text())["identity"]
        for folder in begun.values()
    ]
    assert {key: saved[1][key] for key in saved[0]} == saved[0]
    for trainer in begun:
        for maker, folder in begun.items():
            out = tmp_path / f"{maker}-{trainer}"
            shutil.copytree(folder / "checkpoint-2", out / "checkpoint-2")
            config = both.config(output_dir=str(out), resume_from_checkpoint="auto", **CHANGED)
            capsys.readouterr()
            if trainer == "native":
                said = run("finetune", config, "--tokens", both.tokens).stderr
            else:
                assert main(["train", config]) == 0
                said = capsys.readouterr().err
            told = re.findall(r"(\w+) is \S+ from here on, was \S+", said)
            assert sorted(told) == sorted(CHANGED), said
            assert "learning_rate is 0.005 from here on, was 0.01" in said
    assert len({adapter(tmp_path / f"{maker}-{trainer}") for maker in begun for trainer in begun}) == 1


def test_a_checkpoint_of_before_the_keys_is_gone_on_from(world: pathlib.Path, tmp_path: pathlib.Path) -> None:
    both = Two(tmp_path, recipe(world, save_steps=2, save_strategy="steps", max_steps=2))
    out = both.native("out")
    path = out / "checkpoint-2" / "trainer_state.json"
    state = json.loads(path.read_text())
    state["identity"] = {"seed": 42, "weight_decay": 0.01}
    path.write_text(json.dumps(state))
    config = both.config(resume_from_checkpoint="auto", **(CHANGED | {"pad_to_sequence_len": None}))
    done = run("finetune", config, "--tokens", both.tokens, "--output-dir", out)
    assert "from here on" not in done.stderr
    assert len(figures(out)) == 4


@pytest.mark.parametrize("change", [{}, {"saves_per_epoch": 2, "save_total_limit": 2}, {"save_steps": 0.4}])
def test_checkpoints_come_when_theirs_do(
    world: pathlib.Path, tmp_path: pathlib.Path, change: dict[str, Any]
) -> None:
    both = Two(tmp_path, recipe(world, save_strategy=None, max_steps=None, **change))
    theirs, ours = both.python("python"), both.native("native")
    names = [sorted(path.name for path in folder.glob("checkpoint-*")) for folder in (theirs, ours)]
    assert names[0] == names[1] != []
    assert adapter(ours) == adapter(theirs)


def test_a_killed_run_goes_on(world: pathlib.Path, tmp_path: pathlib.Path) -> None:
    steps = {"save_strategy": "steps", "save_steps": 1, "num_epochs": 9, "max_steps": 60, "lora_dropout": 0.1}
    both = Two(tmp_path, recipe(world, **steps))
    whole = both.native("whole")
    config = both.config(auto_resume_from_checkpoints=True)
    out = tmp_path / "killed"
    command = [str(program()), "finetune", config, "--tokens", str(both.tokens), "--output-dir", str(out)]
    kills = 0
    for seconds in random.Random(1).choices([0.01, 0.03, 0.06, 0.1], k=20):
        running = subprocess.Popen([*command, "--quiet"])
        try:
            running.wait(seconds)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
            kills += 1
    assert kills > 0
    assert adapter(both.native("killed", auto_resume_from_checkpoints=True)) == adapter(whole)
    assert figures(out) == figures(whole)


def test_control_c_writes_a_checkpoint(world: pathlib.Path, tmp_path: pathlib.Path) -> None:
    both = Two(tmp_path, recipe(world, num_epochs=100000, max_steps=None))
    command = [
        program(),
        "finetune",
        both.config(),
        "--tokens",
        both.tokens,
        "--output-dir",
        tmp_path / "out",
    ]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "out" / "metrics.jsonl").exists():
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "; go on with resume_from_checkpoint: auto" in said
    (checkpoint,) = (tmp_path / "out").glob("checkpoint-*")
    assert json.loads((checkpoint / "trainer_state.json").read_text())["step"] == int(checkpoint.name[11:])


def test_all_the_way_without_python(world: pathlib.Path, tmp_path: pathlib.Path) -> None:
    both = Two(tmp_path, recipe(world))
    ours = both.native("native")
    run("adapter", "check", world / "nf4", ours, "--for", "vllm")
    base = {"sha256": base_sha256(str(world / "nf4"), {}), "weights": "dequantized"}
    assert json.loads((ours / "monograph.json").read_text())["base"] == base
    wrong = ("merge", world / "mxfp4", "--adapter", ours, "--base", "dequantized", "--out", tmp_path / "no")
    assert "was trained on the base with hash" in run(*wrong, code=3).stderr
    run("merge", world / "nf4", "--adapter", ours, "--base", "dequantized", "--out", tmp_path / "merged")
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert all(bool(parameter.isfinite().all()) for parameter in merged.parameters())
    loaded = PeftModel.from_pretrained(mg.from_pretrained(world / "nf4"), str(ours))
    assert any(bool(p.abs().max() > 0) for name, p in loaded.named_parameters() if "lora_B" in name)


def test_what_an_earlier_run_left_is_not_mixed_with_this_one(
    world: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    both = Two(tmp_path, recipe(world, save_steps=2, save_strategy="steps", max_steps=4))
    out = both.native("out")
    command = ("finetune", both.config(), "--tokens", both.tokens, "--output-dir", out)
    assert "output_dir: " in (said := run(*command, code=3).stderr)
    assert "checkpoint-4 is of an earlier run" in said
    with held(str(out)):
        assert "another run writes into" in run(*command, code=3).stderr
    assert not (out / ".monograph.lock").exists()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"rl": "dpo"}, ["rl is not a key that the native trainer honours"]),
        ({"val_set_size": 0.1}, ["val_set_size is not a key"]),
        ({"no_such_key": 1}, ["no_such_key is not a key"]),
        ({"peft_use_dora": True}, ["peft_use_dora is not a key"]),
        ({"lora_r": 0}, ["lora_r is 0", "wanted a whole number, 1 or more"]),
        ({"lora_target_linear": None}, ["lora_target_modules is missing"]),
        ({"lora_target_linear": False}, ["lora_target_modules is missing", "lora_target_linear: true"]),
        ({"lora_target_linear": None, "lora_target_modules": 7}, ["lora_target_modules is 7, wanted a list"]),
        (
            {"lora_target_linear": None, "lora_target_modules": "(?i)q"},
            ["the regular expression (?i)q, wanted"],
        ),
        ({"fp16": True}, ["fp16 is true, wanted false"]),
        ({"learning_rate": "fast", "seed": 1.5}, ["learning_rate is fast", "seed is 1.5"]),
        ({"gradient_checkpointing": "offload"}, ["gradient_checkpointing is offload"]),
        ({"optimizer": "lion"}, ["optimizer is lion"]),
        ({"base_model": None}, ["base_model is missing"]),
    ],
)
def test_keys_are_refused_by_name(
    world: pathlib.Path, tmp_path: pathlib.Path, keys: dict[str, Any], words: list[str]
) -> None:
    path = tmp_path / "recipe.yml"
    path.write_text(yaml.safe_dump(recipe(world, **keys), sort_keys=False))
    done = run("finetune", path, "--tokens", tmp_path / "none", code=2)
    assert all(word in done.stderr for word in words), done.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a\n", "line 1 is 'a', wanted KEY: VALUE"),
        ("seed: 1\nseed: 2\n", "line 2 seed was written in line 1 already"),
        ("seed: &x 1\n", "'&x 1', which is no plain scalar"),
        ("base_model: |\n  text\n", "line 1 has '|'"),
        ("  seed: 1\n", "line 1 belongs to no key"),
        ("lora_target_modules: [a,\n  b]\n", "goes on in another line"),
        ("datasets: [{path: a, path: b}]\n", "line 1 has path twice"),
        ("datasets: [{path: a}]\nseed: {a: 1}\n", "seed is {a: 1}"),
    ],
)
def test_what_is_no_flat_yaml_is_refused(tmp_path: pathlib.Path, text: str, words: str) -> None:
    (tmp_path / "recipe.yml").write_text(text)
    done = run("finetune", tmp_path / "recipe.yml", "--tokens", tmp_path / "none", code=2)
    assert words in done.stderr


def test_a_run_that_learnt_nothing_is_an_error(world: pathlib.Path, tmp_path: pathlib.Path) -> None:
    both = Two(tmp_path, recipe(world, max_steps=2))
    base = shutil.copytree(world / "nf4", tmp_path / "base")
    file = next(base.glob("*.safetensors"))
    tensors = load_file(file)
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, file, {"format": "pt"})
    keys = both.config(base_model=str(base))
    done = run("finetune", keys, "--tokens", both.tokens, "--output-dir", tmp_path / "out", code=3)
    assert "each of the 2 steps had a loss or gradient that is not finite" in done.stderr
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_more_steps_than_are_counted_are_refused(world: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """They were planned for hours, deaf to Ctrl-C."""
    both = Two(tmp_path, recipe(world, gradient_accumulation_steps=10**9))
    endless = both.config(num_epochs=10**9, max_steps=None)
    done = run("finetune", endless, "--tokens", both.tokens, "--dry-run", code=3)
    assert "num_epochs gives some 1000000000 steps, wanted 16777216 at most" in done.stderr
    run("finetune", both.config(num_epochs=10**9, max_steps=3), "--tokens", both.tokens, "--dry-run")


def test_a_folder_is_no_recipe(world: pathlib.Path, tmp_path: pathlib.Path) -> None:
    done = run("finetune", world / "nf4", "--tokens", tmp_path / "none", code=2)
    assert "nf4' is a folder, wanted a YAML file" in done.stderr


def test_a_file_is_no_base(world: pathlib.Path, tmp_path: pathlib.Path) -> None:
    both = Two(tmp_path, recipe(world, max_steps=1))
    for name, words in (
        ("model.gguf", "wanted the folder that monograph quantize makes; monograph train takes a GGUF file"),
        ("model.safetensors", "is a file, wanted the folder that monograph quantize makes"),
    ):
        file = tmp_path / name
        file.write_bytes(b"GGUF")
        config = both.config(base_model=str(file))
        done = run("finetune", config, "--tokens", both.tokens, "--output-dir", tmp_path / "x", code=3)
        assert f"{file}: is a file" in done.stderr
        assert words in done.stderr
        done = run("generate", "--native", file, "--tokens", "1,2", code=3)
        assert f"{file}: is a file" in done.stderr


def test_a_base_that_is_not_packed(world: pathlib.Path, tmp_path: pathlib.Path) -> None:
    both = Two(tmp_path, recipe(world, base_model=str(world / "model"), adapter="lora", max_steps=3))
    assert adapter(both.native("native")) == adapter(both.python("python"))
    config = both.config(adapter="qlora")
    done = run("finetune", config, "--tokens", both.tokens, "--output-dir", tmp_path / "x", code=3)
    assert "is not packed, and adapter is qlora" in done.stderr


def test_a_changed_token_file_is_refused(world: pathlib.Path, tmp_path: pathlib.Path) -> None:
    both = Two(tmp_path, recipe(world))
    data = bytearray(both.tokens.read_bytes())
    data[-4] ^= 1
    both.tokens.write_bytes(data)
    done = run("finetune", both.config(), "--tokens", both.tokens, "--output-dir", tmp_path / "x", code=3)
    assert "tokens.safetensors: " in done.stderr
