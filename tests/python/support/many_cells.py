"""Seven adapters of a recipe in every circumstance that must not change a bit of them.

A cell is an instruction set, a family, a number of ranks, a mode, and checkpointing or not. Of all cells of
an instruction set and a family, an adapter has one hash: that of `--only NAME`, eagerly on one rank.

    python -m support.many_cells ROOT 'amx llama 2 graph on' 'avx2 qwen3 1 eager off'    # prints JSON
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
from dataclasses import astuple, dataclass
from itertools import product
from typing import Any

import torch
import yaml

from support.forked_ranks import Launcher
from support.recipe_files import make_tokenizer, small_recipe, write_jsonl
from support.step_models import FAMILIES, SMALL
from support.tiny_moe import save_tiny

STEPS = 2
ISAS = ("scalar", "avx2", "avx512", "avx512_bf16", "amx")  # the later, the more the machine must have
KINDS = ("llama", "qwen3", "qwen3_moe")
RANKS = (1, 2, 3)
MODES = ("eager", "graph", "whole_step")
# In a mixture all linear layers are those of experts too, which take neither dropout nor DoRA.
_NO_EXPERTS = {"lora_target_linear": False, "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
SEVEN: list[dict[str, Any]] = [
    {"name": "norm", "lora_r": 8, "lora_dropout": 0.1, "gradient_accumulation_steps": 3},
    {"name": "bias", "lora_r": 1, "learning_rate": 0.02, "seed": 7, "lr_scheduler": "linear"},
    {"name": "dora", "lora_r": 12, "peft_use_dora": True, "lora_dropout": 0.2,
     "gradient_accumulation_steps": 2},
    {"name": "wide", "lora_r": 33, "weight_decay": 0.1, "sequence_len": 48, "max_grad_norm": 0.05},
    {"name": "odd", "lora_r": 12, "lora_dropout": 0.3, "peft_use_rslora": True, "max_grad_norm": 0},
    {"name": "part", "lora_target_linear": False, "lora_target_modules": ["q_proj", "v_proj"], "seed": 3},
    {"name": "last", "lora_r": 4, "adam_beta1": 0.8, "adam_epsilon": 1e-6, "min_sample_len": 3},
]  # fmt: skip


@dataclass(frozen=True)
class Cell:
    isa: str
    family: str
    ranks: int
    mode: str
    checkpointing: bool

    def __str__(self) -> str:
        *most, checkpointing = astuple(self)
        return " ".join([*map(str, most), "on" if checkpointing else "off"])

    @staticmethod
    def of(text: str) -> Cell:
        isa, family, ranks, mode, checkpointing = text.split()
        return Cell(isa, family, int(ranks), mode, checkpointing == "on")

    @property
    def most(self) -> int:
        """Micro-batches that a step may have: whole_step holds one of each rank."""
        return self.ranks if self.mode == "whole_step" else max(RANKS)


PRODUCT = [Cell(*values) for values in product(ISAS, KINDS, RANKS, MODES, (False, True))]
# Three cells of each instruction set, in which every pair of values of two dimensions is met.
PAIRWISE = [
    Cell(isa, family, RANKS[(place + turn) % 3], MODES[(place + 2 * turn) % 3], (place + turn // 3) % 2 == 0)
    for turn, isa in enumerate(ISAS)
    for place, family in enumerate(KINDS)
]


def here(cells: list[Cell]) -> list[Cell]:
    """Those whose instruction set this machine has."""
    from monograph.ops.show_config import ISA_NAMES

    machine = ISAS.index(ISA_NAMES[torch.ops.monograph.system_info()[1]])
    return [cell for cell in cells if ISAS.index(cell.isa) <= machine]


class Cells:
    """Runs of one family in a folder, and the hashes of what they left."""

    def __init__(self, root: pathlib.Path, launcher: Launcher) -> None:
        self.root, self.launcher = root, launcher
        self._alone: dict[tuple[str, str, int], dict[str, str]] = {}

    def both(self, cell: Cell) -> dict[str, Any]:
        """By adapter what the cell made of it, and what `--only` did."""
        key = (cell.isa, cell.family, cell.most)
        if key not in self._alone:
            first = Cell(cell.isa, cell.family, 1, "eager", False)
            for entry in SEVEN:
                self._run(first, "alone", cell.most, "--only", entry["name"])
            self._alone[key] = self._left("alone", cell.isa)
        self._run(cell, "together", cell.most)
        return {"together": self._left("together", cell.isa), "alone": self._alone[key]}

    def _run(self, cell: Cell, name: str, most: int, *options: str) -> None:
        path = self.root / f"{name}.yml"
        path.write_text(yaml.safe_dump(self._recipe(cell, name, most)))
        arguments = ["train", str(path), "--quiet", *options]
        done = self.launcher.run(cell.ranks, arguments, env={"MONOGRAPH_ISA": cell.isa}, timeout=1200)
        if any(done.exits[0]):
            raise RuntimeError(f"{cell} {options}: exit codes {done.exits[0]}\n{done.errors[0][0][-2000:]}")

    def _recipe(self, cell: Cell, name: str, most: int) -> dict[str, Any]:
        world = self.root / cell.family
        if not world.exists():
            make_world(world, cell.family)
        entries = [entry | {"gradient_accumulation_steps": 1} | entry for entry in SEVEN]
        for entry in entries:
            count = entry["gradient_accumulation_steps"]
            entry["gradient_accumulation_steps"] = min(count, most)
            if cell.family == "qwen3_moe" and (entry.get("lora_dropout") or entry.get("peft_use_dora")):
                entry |= _NO_EXPERTS
        given = {"adapters": entries, "max_steps": STEPS, "save_steps": STEPS, "step_mode": cell.mode}
        given |= {"gradient_checkpointing": cell.checkpointing, "output_dir": str(self.root / name)}
        return small_recipe(world, "instruction", **given)

    def _left(self, name: str, isa: str) -> dict[str, str]:
        """Of each adapter one hash of the adapter, its moments and its metrics, and the kernels it had."""
        found = {}
        for entry in SEVEN:
            folder = self.root / name / entry["name"]
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            kept = [[line["step"], line["loss"].hex(), line["grad_norm"].hex()] for line in lines]
            parts = [
                folder / "adapter_model.safetensors",
                folder / f"checkpoint-{STEPS}/optimizer.safetensors",
            ]
            digest = hashlib.sha256(b"".join(path.read_bytes() for path in parts) + json.dumps(kept).encode())
            state = json.loads((folder / f"checkpoint-{STEPS}/trainer_state.json").read_text())
            assert state["identity"]["instruction set"] == isa
            found[entry["name"]] = digest.hexdigest()
        shutil.rmtree(self.root / name)
        return found


def make_world(root: pathlib.Path, family: str) -> None:
    make_tokenizer(root / "model")
    tokens = {"vocab_size": 400, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    if family in FAMILIES:
        config_class, model_class, options = FAMILIES[family]
        torch.manual_seed(0)
        model = model_class(config_class(**(SMALL | options | tokens)))
        model.to(torch.bfloat16).save_pretrained(root / "model")
    else:
        save_tiny(root / "model", family, dtype=torch.bfloat16, **tokens)
    rows = [{"instruction": f"What is {n}?", "output": f"{n} dog {n % 7}"} for n in range(40)]
    write_jsonl(root / "train.jsonl", rows)


def results_of(root: pathlib.Path, cells: list[Cell]) -> dict[str, Any]:
    """By cell, in a process of its own: it forks."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "support.many_cells", str(root), *map(str, cells)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


def main(root: str, *names: str) -> None:
    for family in {Cell.of(name).family for name in names}:  # before a kernel has chosen: no fork has one
        if not (pathlib.Path(root) / family).exists():
            make_world(pathlib.Path(root) / family, family)
    results: dict[str, Any] = {}
    with Launcher() as launcher:
        cells = Cells(pathlib.Path(root), launcher)
        for name in names:
            results[name] = cells.both(Cell.of(name))
            wrong = [n for n, h in results[name]["alone"].items() if results[name]["together"][n] != h]
            print(f"{name}: {wrong or 'one hash each'}", file=sys.stderr, flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
