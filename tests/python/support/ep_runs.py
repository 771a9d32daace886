"""Recipes with experts that are spread over forked ranks: whole, killed, resumed on other numbers of ranks.

python -m support.ep_runs ROOT spread|faults|best    # cases of a test file; prints results as JSON
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import sys
from typing import Any

import torch

from support.forked_ranks import Launcher
from support.rank_program import EXPERT_POINTS
from support.rank_runs import Runs
from support.recipe_files import make_tokenizer, write_jsonl
from support.tiny_moe import save_tiny

STEPS = 4
KEYS: dict[str, Any] = {
    "lora_target_linear": False,
    "lora_target_modules": ["q_proj"],
    "lora_target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "lora_dropout": 0.0,
    "max_steps": STEPS,
    "gradient_checkpointing": True,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.02,
}


def make_runs(root: pathlib.Path, launcher: Any) -> Runs:
    """A Qwen3-MoE of one layer with 8 experts."""
    if not (root / "model").exists():
        make_tokenizer(root / "model")
        save_tiny(root / "model", "qwen3_moe", dtype=torch.bfloat16, layers=1, vocab_size=400)
        rows = [{"instruction": f"What is {n}?", "output": f"{n} dog {n % 7}"} for n in range(76)]
        write_jsonl(root / "train.jsonl", rows)
    return Runs(root, launcher, **KEYS)


def over(ranks: int, **keys: Any) -> dict[str, Any]:
    return ({"expert_parallel_size": ranks} if ranks > 1 else {}) | keys


def _result(runs: Runs, name: str, done: Any) -> dict[str, Any]:
    record = runs.root / name / "monograph.json"
    base = json.loads(record.read_text())["base"] if record.is_file() else None
    return vars(done) | runs.left(name) | {"base": base}


def spread(runs: Runs) -> dict[str, Any]:
    """Each way to hold the experts. `both`: owners by twos, the rest of the base cut over four."""
    ways = {
        "whole": (1, {}),
        "on 2": (2, over(2)),
        "on 3": (3, over(3)),
        "both": (4, over(2, shard_size=4)),
    }
    results = {}
    for name, (ranks, keys) in ways.items():
        results[name] = _result(runs, name, runs.run(name, ranks, keys=keys))
    results["no divisor"] = vars(runs.run("no-divisor", 3, keys=over(2)))
    return results


def faults(runs: Runs) -> dict[str, Any]:
    results = {"whole": _result(runs, "whole", runs.run("whole", 1))}
    for point in EXPERT_POINTS:
        name = point.replace(" ", "-")
        done = runs.run(name, 2, kill=f"{point}:-1:3", restarts=1, keys=over(2))
        results[point] = _result(runs, name, done) | {"dealt": runs.dealt(name)}
    plan = ((2, "after backward:-1:3"), (4, "in combine:0:3"), (3, "after the optimiser:-1:4"), (1, ""))
    exits = []
    for ranks, kill in plan:
        options = ("--auto-resume-from-checkpoints",)
        done = runs.run("resize", ranks, *options, kill=kill, keys=over(ranks, save_steps=1))
        exits.append(done.exits[-1])
    results["resize"] = _result(runs, "resize", done) | {"of all": exits}
    return results


def best(runs: Runs) -> dict[str, Any]:
    """Runs of two steps, the second of which makes it worse: the adapter of the first is written at last."""
    keys: dict[str, Any] = {
        "load_best_model_at_end": True,
        "eval_steps": 1,
        "save_steps": 1,
        "save_total_limit": 0,
    }
    keys |= {"learning_rate": 25.0, "lr_scheduler": "constant", "max_steps": 2}
    results = {}
    for name, ranks in (("whole", 1), ("on 2", 2), ("on 3", 3)):
        results[name] = _result(runs, name, runs.run(name, ranks, keys=over(ranks, **keys)))
        for what, file in (("adapters", "adapter_model"), ("optimizers", "optimizer")):
            saved = sorted((runs.root / name).glob(f"checkpoint-*/{file}.safetensors"))
            hashes = {path.parent.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in saved}
            results[name][what] = hashes
        results[name]["left over"] = sorted(p.name for p in (runs.root / name).glob(".unfinished*"))
    return results


CASES = {"spread": spread, "faults": faults, "best": best}


def main(root: str, case: str) -> None:
    with Launcher() as launcher:
        print(json.dumps(CASES[case](make_runs(pathlib.Path(root), launcher))))


if __name__ == "__main__":
    main(*sys.argv[1:])
