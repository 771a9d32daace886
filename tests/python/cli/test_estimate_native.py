"""`monograph estimate --native` says what `monograph finetune --dry-run` says."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import pytest
import torch

from monograph.__main__ import main
from support.native_steps import ATTENTION, MIXTURE, STACKED, make_base
from support.native_tool import run
from support.recipe_files import make_model, make_tokenizer, write_jsonl
from support.two_trainers import Two, recipe

TOKENS = 256
WIDE = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 400, "max_position_embeddings": 512}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("estimate")
    make_tokenizer(root / "model")
    make_model(root / "model", **WIDE)
    run("quantize", root / "model", root / "nf4", "--to", "nf4", "--double-quant")
    rows = [{"instruction": f"What is {n}?", "output": f"{n} dog cat " * 30} for n in range(20)]
    write_jsonl(root / "train.jsonl", rows)
    return root


def estimated(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, int]:
    capsys.readouterr()
    assert main(["estimate", *map(str, arguments), "--native", "--tokens", str(TOKENS), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["total_bytes"] == sum(report["bytes"].values())
    found: dict[str, int] = report["bytes"]
    return found


def said(folder: pathlib.Path, keys: dict[str, Any]) -> dict[str, int]:
    two = Two(folder, keys)
    dry = run("finetune", two.config(), "--tokens", two.tokens, "--dry-run", "--json")
    report = json.loads(dry.stdout)
    assert (report["tokens"], report["micro_batches"]) == (TOKENS, 1)
    found: dict[str, int] = report["bytes"]
    return found


def check(found: dict[str, int], wanted: dict[str, int]) -> None:
    assert list(found) == list(wanted)
    # What the trainer copies because it does not lie at a multiple of its size.
    assert wanted.pop("base") == pytest.approx(found.pop("base"), rel=0.005)
    assert found == wanted


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{"gradient_checkpointing": True}, {"lora_r": 3, "num_epochs": 1}])
def test_a_llama(
    world: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], keys: dict[str, Any]
) -> None:
    wanted = said(tmp_path, recipe(world, sequence_len=TOKENS, **keys))
    options = ["--rank", keys.get("lora_r", 4)]
    options += [] if "gradient_checkpointing" in keys else ["--no-checkpointing"]
    check(estimated(capsys, world / "nf4", *options), dict(wanted))
    # Before it is packed; the folder has the settings of each packed weight, too.
    planned = estimated(capsys, world / "model" / "config.json", *options)
    check(planned, dict(wanted))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3_text", "qwen2", "qwen3_moe"])
def test_other_families(
    world: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    experts = family == "qwen3_moe"
    changes = WIDE | ({"sliding_window": 64, "pad_token_id": 2} if family == "gemma3_text" else {})
    changes |= MIXTURE if experts else {}
    to = STACKED if experts else ("nf4", "--double-quant")
    base = make_base(tmp_path, family, to, torch.bfloat16, **changes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(world / "model" / name, base)
    keys: dict[str, Any] = {"base_model": str(base), "gradient_checkpointing": True}
    if experts:
        keys |= {"lora_target_linear": None, "lora_target_modules": ATTENTION}
    check(estimated(capsys, base, "--rank", 4), said(tmp_path, recipe(world, sequence_len=TOKENS, **keys)))


def test_what_the_native_trainer_does_not_know_is_named(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "opt", "hidden_size": 64}))
    assert main(["estimate", str(tmp_path), "--native"]) == 2
    assert "model_type is 'opt', the native trainer knows llama, mistral," in capsys.readouterr().err
    assert main(["estimate", str(tmp_path), "--native", "--expert-parallel-size", "2"]) == 2
    assert "--expert-parallel-size is 2 beside --native, wanted 1" in capsys.readouterr().err
    packed = {"model_type": "llama", "quantization_config": {"quant_method": "bitsandbytes"}}
    (tmp_path / "config.json").write_text(json.dumps(packed))
    assert main(["estimate", str(tmp_path), "--native"]) == 2
    assert "has no .safetensors, and is quantised; wanted --format" in capsys.readouterr().err
