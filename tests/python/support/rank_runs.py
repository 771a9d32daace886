"""Recipes on forked ranks, for tests: a small model and its data, runs of it, and what they left.

python -m support.rank_runs ROOT over_ranks|killed    # cases of a test file; prints results as JSON
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

import yaml

from monograph.recipe.run.metrics import read_metrics
from support.forked_ranks import Done, Launcher
from support.recipe_files import make_model, make_tokenizer, small_recipe, write_jsonl

STEPS, MICRO_BATCHES = 6, 5  # an epoch has 17 rows: its fourth step two micro-batches


class Runs:
    """Runs in a folder of their own each. `change` is put over the recipe of all."""

    def __init__(self, root: pathlib.Path, launcher: Launcher, documents: int = 76, **change: Any) -> None:
        self.root, self.launcher, self.change = root, launcher, change
        if not (root / "model").exists():
            make_tokenizer(root / "model")
            make_model(root / "model", num_hidden_layers=1)
            rows = [{"instruction": f"What is {n}?", "output": f"{n} dog {n % 7}"} for n in range(documents)]
            write_jsonl(root / "train.jsonl", rows)

    def recipe(self, name: str, **change: Any) -> str:
        """Writes a recipe of STEPS steps: dropout, packed rows, evaluations, a checkpoint every two steps."""
        keys = small_recipe(
            self.root,
            "instruction",
            output_dir=str(self.root / name),
            lora_dropout=0.1,
            gradient_accumulation_steps=MICRO_BATCHES,
            val_set_size=8,
            eval_steps=3,
            save_steps=2,
            num_epochs=10,
            max_steps=STEPS,
            torch_compile=False,
            ddp_timeout=120,
        )
        path = self.root / f"{name}.yml"
        path.write_text(yaml.safe_dump(keys | self.change | change))
        return str(path)

    def run(
        self,
        name: str,
        ranks: int,
        *options: str,
        kill: str = "",
        keys: dict[str, Any] | None = None,
        **how: Any,
    ) -> Done:
        log = self.root / f"{name}.log"
        log.mkdir(exist_ok=True)
        env = {"MONOGRAPH_TEST_LOG": str(log)} | ({"MONOGRAPH_TEST_KILL": kill} if kill else {})
        arguments = ["train", self.recipe(name, **(keys or {})), *options]
        return self.launcher.run(ranks, arguments, env=env | how.pop("env", {}), **how)

    def left(self, name: str) -> dict[str, Any]:
        """The losses by step in hex, and the hash of the adapter."""
        lines = read_metrics(str(self.root / name / "metrics.jsonl"))
        trace = [
            [line["step"], float(line.get("loss", 0)).hex(), float(line.get("eval_loss", 0)).hex()]
            for line in lines
        ]
        path = self.root / name / "adapter_model.safetensors"
        adapter = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        tokens = [line["tokens"] for line in lines if "tokens" in line]
        return {"trace": trace, "adapter": adapter, "tokens": tokens}

    def dealt(self, name: str) -> str:
        """Empty if every micro-batch was computed once in each step; else what was not."""
        found: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for path in sorted((self.root / f"{name}.log").glob("*.jsonl")):
            for text in path.read_text().splitlines():
                if text.endswith("}"):  # a killed rank may leave half a line
                    line = json.loads(text)
                    found.setdefault((line["start"], line["step"]), []).append((line["index"], line["rank"]))
        last = {step: start for start, step in sorted(found, key=_start_of)}
        for (start, step), computed in found.items():
            indices = sorted(index for index, _ in computed)
            whole = list(range(len(indices)))
            if (last[step] == start and indices != whole) or len(set(indices)) != len(indices):
                return f"step {step} of start {start} computed {sorted(computed)}"
        return "" if found else "no micro-batch was logged"

    def forget(self, name: str) -> None:
        shutil.rmtree(self.root / name, ignore_errors=True)
        shutil.rmtree(self.root / f"{name}.log", ignore_errors=True)


def _start_of(key: tuple[str, int]) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", key[0])]


def over_ranks(runs: Runs) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for ranks in (1, 2, 3, 4):
        done = runs.run(f"on-{ranks}", ranks)
        dealt = runs.dealt(f"on-{ranks}") if ranks > 1 else ""
        results[f"on {ranks}"] = vars(done) | runs.left(f"on-{ranks}") | {"dealt": dealt}
    done = runs.run("ended", 2, kill="after backward:-1:3:15")  # SIGTERM to the last rank in step 3
    results["ended"] = vars(done) | {"left": sorted(os.listdir(runs.root / "ended"))} | runs.left("ended")
    done = runs.run("ended", 3, "--resume-from-checkpoint", "auto")
    results["resumed"] = vars(done) | runs.left("ended")
    few = {"gradient_accumulation_steps": 2, "max_steps": 2, "torch_compile": None, "val_set_size": 0}
    for ranks in (1, 3):
        results[f"idle on {ranks}"] = vars(runs.run(f"idle-{ranks}", ranks, keys=few)) | runs.left(
            f"idle-{ranks}"
        )
    results["raised"] = vars(runs.run("raised", 2, kill="raise:-1:2"))
    other = {"virtual_shards": 2}
    results["another run"] = vars(runs.run("ended", 1, "--resume-from-checkpoint", "auto", keys=other))
    return results


def killed(runs: Runs) -> dict[str, Any]:
    results: dict[str, Any] = {"whole": vars(runs.run("whole", 2)) | runs.left("whole")}
    for point, rank in (("in save", 0), ("in the sum", -1)):
        name = point.replace(" ", "-")
        done = runs.run(name, 2, kill=f"{point}:{rank}:4", restarts=1)
        results[point] = vars(done) | runs.left(name) | {"dealt": runs.dealt(name)}
    return results


CASES = {"over_ranks": over_ranks, "killed": killed}


def results_of(root: pathlib.Path, case: str, program: str = "support.rank_runs") -> dict[str, Any]:
    """What a case gives, in a process of its own: it forks."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", program, str(root), case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


def main(root: str, case: str) -> None:
    with Launcher() as launcher:
        print(json.dumps(CASES[case](Runs(pathlib.Path(root), launcher))))


if __name__ == "__main__":
    main(*sys.argv[1:])
