"""Our own step against itself: eager, compiled, and with each allowed option of Inductor flipped alone.

    python -m monograph.bench step --case own --steps 300
    python -m monograph.bench step --case own --steps 300 --peers inductor,epilogue_fusion=false

A small Llama in NF4 with LoRA. Every variant is a process of its own and makes `steps` steps one after the
other; the second seed (documents and adapter) goes through the variants in reversed order. A line has the
median and the fastest milliseconds of a step, the processor time, the peak of the process tree in MiB and the
last loss, which must not depend on the variant.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from typing import Any

from monograph.bench.contenders import Contender
from monograph.bench.report import Report
from monograph.bench.rounds import Paired
from monograph.recipe.config.compile_options import OPTIONS, option_default

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 2048,
    "tie_word_embeddings": False,
}
LENGTHS = [90, 38]
SEEDS = (0, 1)
# Inductor rounds a fused bf16 chain once, and three hundred steps carry that on.
LOSS_TOLERANCE = 0.02


def variants() -> dict[str, dict[str, Any]]:
    """Mode and options by name; an option stands with the value that is not Inductor's default."""
    found: dict[str, dict[str, Any]] = {
        mode: {"mode": mode} for mode in ("eager", "graph", "whole_step", "inductor")
    }
    for name in OPTIONS:
        value = not option_default(name)
        found[f"{name}={str(value).lower()}"] = {"mode": "inductor", "options": {name: value}}
    return found


def asked(names: list[str] | None) -> dict[str, dict[str, Any]]:
    """The variants of these names, or all. ValueError for another name."""
    found = variants()
    if unknown := [name for name in names or [] if name not in found]:
        raise ValueError(f"step --case own: --peers has {unknown[0]!r}, wanted some of {', '.join(found)}")
    return {name: how for name, how in found.items() if not names or name in names}


def measure(folder: str, threads: int, arguments: argparse.Namespace, report: Report) -> dict[str, float]:
    wanted = asked(arguments.peers)
    job = {"folder": folder, "threads": threads, "lengths": LENGTHS, "checkpointing": True}
    job |= {"case": "own", "contender": "ours"}
    summary: dict[str, float] = {}
    for seed in SEEDS:
        order = list(wanted) if seed == SEEDS[0] else list(reversed(wanted))
        losses = {}
        for name in order:
            contender = Contender(job | wanted[name] | {"seed": seed}, "monograph.bench.step_contender")
            steps = [contender.ask("step") for _ in range(arguments.steps or 300)]
            contender.end()
            ms = [step["ms"] for step in steps]
            losses[name] = steps[-1]["loss"]
            case: dict[str, Any] = {"case": "own", "variant": name, "seed": seed, "steps": len(steps)}
            case |= {
                "threads": threads,
                "median_ms": round(statistics.median(ms), 3),
                "cpu_ms": round(statistics.median(step["cpu_ms"] for step in steps), 3),
                "peak_MiB": round(contender.peak / 2**20, 1),
                "first_step_s": round(contender.start["first_step_s"], 2),
                "loss": round(losses[name], 5),
                "load": round(os.getloadavg()[0], 1),
            }
            report.case(case, Paired({"ours": min(ms)}, {}, 0, 0.0), "ours")
            prefix = f"own_{name}_seed_{seed}"
            summary |= {f"{prefix}_ms": case["median_ms"], f"{prefix}_peak_MiB": case["peak_MiB"]}
        spread = max(losses.values()) / min(losses.values()) - 1
        if spread > LOSS_TOLERANCE:
            raise RuntimeError(f"seed {seed}: the last losses differ by {spread:.3f}: {losses}")
        print(f"  seed {seed}: last losses within {spread:.1e}", file=sys.stderr)
    return summary
