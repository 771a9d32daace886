"""`monograph finetune --dry-run`: what a step takes, against the memory of runs; nothing is written."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
from typing import Any

import pytest
import torch

from support.native_steps import ATTENTION, MIXTURE, STACKED, make_base
from support.native_tool import run
from support.recipe_files import make_model, make_tokenizer, write_jsonl
from support.two_trainers import Two, recipe

pytestmark = pytest.mark.slow

WIDE = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("dry")
    make_tokenizer(root / "model")
    make_model(root / "model", **WIDE)
    run("quantize", root / "model", root / "nf4", "--to", "nf4", "--double-quant")
    rows = [{"instruction": f"What is {n}?", "output": f"{n} dog cat " * 60} for n in range(60)]
    write_jsonl(root / "train.jsonl", rows)
    return root


def both(world: pathlib.Path, folder: pathlib.Path, **keys: Any) -> tuple[dict[str, Any], float]:
    """The report of a dry run, and the peak of a run of two steps in bytes."""
    folder.mkdir()
    two = Two(folder, recipe(world, lora_r=16, max_steps=2, **keys))
    command = ["finetune", two.config(), "--tokens", two.tokens, "--output-dir", folder / "out"]
    report = json.loads(run(*command, "--dry-run", "--json").stdout)
    assert not (folder / "out").exists()
    lines = (two.native("out") / "metrics.jsonl").read_text().splitlines()
    return report, max(json.loads(line)["memory_gib"] for line in lines) * 2**30


@pytest.mark.parametrize(
    "keys",
    [
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": False},
        {"gradient_checkpointing": True, "lora_dropout": 0.1},
        {"gradient_checkpointing": True, "gradient_accumulation_steps": 5, "bf16": False},
    ],
)
def test_tokens_take_what_it_says(world: pathlib.Path, tmp_path: pathlib.Path, keys: dict[str, Any]) -> None:
    few, low = both(world, tmp_path / "few", sequence_len=512, **keys)
    many, high = both(world, tmp_path / "many", sequence_len=4096, **keys)
    assert (few["tokens"], many["tokens"]) == (512, 4096)
    assert few["micro_batches"] == keys.get("gradient_accumulation_steps", 1)
    said = many["total_bytes"] - few["total_bytes"]
    assert high - low == pytest.approx(said, rel=0.1)
    # The program, its stacks and the scratch of kernels are not counted.
    assert many["total_bytes"] - 2**20 < high < many["total_bytes"] + 48 * 2**20


def test_norms_and_tables_of_gemma_are_counted(world: pathlib.Path, tmp_path: pathlib.Path) -> None:
    changes = WIDE | {"vocab_size": 400, "num_hidden_layers": 2, "sliding_window": 64, "pad_token_id": 2}
    base = make_base(tmp_path, "gemma3_text", ("nf4", "--double-quant"), torch.bfloat16, **changes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(world / "model" / name, base)
    keys = {"base_model": str(base), "gradient_checkpointing": False}
    few, low = both(world, tmp_path / "few", sequence_len=512, **keys)
    many, high = both(world, tmp_path / "many", sequence_len=4096, **keys)
    said = many["total_bytes"] - few["total_bytes"]
    assert high - low == pytest.approx(said, rel=0.05)


def test_experts_are_counted(world: pathlib.Path, tmp_path: pathlib.Path) -> None:
    sizes = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
    changes = WIDE | MIXTURE | sizes | {"vocab_size": 400, "num_hidden_layers": 2}
    base = make_base(tmp_path, "qwen3_moe", STACKED, torch.bfloat16, **changes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(world / "model" / name, base)
    keys = {"base_model": str(base), "lora_target_linear": None, "lora_target_modules": ATTENTION}
    few, low = both(world, tmp_path / "few", sequence_len=512, **keys)
    many, high = both(world, tmp_path / "many", sequence_len=4096, **keys)
    said = many["total_bytes"] - few["total_bytes"]
    assert high - low == pytest.approx(said, rel=0.1)


def test_the_parts_that_are_known_to_the_byte(world: pathlib.Path, tmp_path: pathlib.Path) -> None:
    report, _ = both(world, tmp_path / "run", sequence_len=512, gradient_accumulation_steps=4)
    layer = 2 * 512 * 16 * 2 + (512 + 256) * 16 * 2 + (512 + 1408) * 16 * 3
    assert report["bytes"]["moments"] == 8 * 3 * layer
    assert report["bytes"]["adapter"] == 6 * 3 * layer
    assert report["bytes"]["gradients"] == 3 * 4 * (3 * layer + 1)  # two sums on the way down, one part
    files = sum(file.stat().st_size for file in (world / "nf4").glob("*.safetensors"))
    assert files - 2**16 < report["bytes"]["base"] < files
    assert report["total_bytes"] == sum(report["bytes"].values())


def test_text(world: pathlib.Path, tmp_path: pathlib.Path) -> None:
    two = Two(tmp_path, recipe(world, sequence_len=512, max_steps=7))
    done = run("finetune", two.config(), "--tokens", two.tokens, "--dry-run")
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == ["base", "adapter", "moments", "gradients", "activations", "together"]
    assert re.search(r"7 steps of 1 micro-batches, of 512 tokens at most; nothing was trained", done.stderr)


def test_what_training_refuses_is_refused(world: pathlib.Path, tmp_path: pathlib.Path) -> None:
    two = Two(tmp_path, recipe(world, sequence_len=512))
    wrong = ["finetune", two.config(sequence_len=256), "--tokens", two.tokens, "--dry-run"]
    assert "sequence_len" in run(*wrong, code=3).stderr
