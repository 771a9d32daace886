"""One recipe by `monograph train` and by `monograph finetune`."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import yaml

from monograph.__main__ import main
from support.native_tool import run
from support.recipe_files import make_model, make_tokenizer, write_jsonl

# Of a line of metrics.jsonl all but what the clock says.
FIGURES = ("step", "epoch", "loss", "grad_norm", "learning_rate", "tokens", "targets", "packing_efficiency")


def make_world(root: pathlib.Path) -> pathlib.Path:
    make_tokenizer(root / "model")
    make_model(root / "model")
    run("quantize", root / "model", root / "nf4", "--to", "nf4", "--double-quant")
    run("quantize", root / "model", root / "mxfp4", "--to", "mxfp4")
    rows = [{"instruction": f"What is {n}?", "output": f"{n} dog " * (1 + n % 5)} for n in range(40)]
    write_jsonl(root / "train.jsonl", rows)
    return root


def recipe(world: pathlib.Path, **change: Any) -> dict[str, Any]:
    return {
        "base_model": str(world / "nf4"),
        "adapter": "qlora",
        "lora_target_linear": True,
        "lora_r": 4,
        "datasets": [{"path": str(world / "train.jsonl"), "type": "instruction"}],
        "dataset_prepared_path": str(world / "prepared"),
        "sequence_len": 96,
        "sample_packing": True,
        "learning_rate": 0.01,
        "step_mode": "eager",
        "num_epochs": 3,
        "max_steps": 10,
        "weight_decay": 0.01,
        "warmup_ratio": 0.1,
        "save_strategy": "no",
    } | change


class Two:
    """One recipe by both trainers."""

    def __init__(self, folder: pathlib.Path, keys: dict[str, Any]) -> None:
        self.folder, self.keys = folder, keys
        self.tokens = folder / "tokens.safetensors"
        assert main(["preprocess", self.config(), "--tokens", str(self.tokens), "--quiet"]) == 0

    def config(self, **change: Any) -> str:
        path = self.folder / "recipe.yml"
        path.write_text(yaml.safe_dump(self.keys | change, sort_keys=False))
        return str(path)

    def python(self, out: str, **change: Any) -> pathlib.Path:
        assert main(["train", self.config(output_dir=str(self.folder / out), **change), "--quiet"]) == 0
        return self.folder / out

    def native(self, out: str, *arguments: Any, **change: Any) -> pathlib.Path:
        folder = self.folder / out
        run(
            "finetune",
            self.config(**change),
            "--tokens",
            self.tokens,
            "--output-dir",
            folder,
            "--threads",
            2,
            *arguments,
        )
        return folder


def adapter(folder: pathlib.Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()


def figures(folder: pathlib.Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{name: json.loads(line)[name] for name in FIGURES} for line in lines]
