"""Time to the first step of a 32-layer model of Qwen3-0.6B width, by mode, with an empty and a full cache.

Each contender is a process of its own. `peer` is transformers, PEFT and bitsandbytes under torch.compile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile

from monograph.bench.report import Report


def _run(who: str, layers: int, cache: str) -> dict[str, float]:
    environment = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=cache)
    command = [sys.executable, "-m", "monograph.bench.first_step_contender", who, str(layers)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    numbers: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def run(arguments: argparse.Namespace, report: Report) -> None:
    layers = 4 if arguments.quick else 32
    found: dict[str, dict[str, float]] = {}
    for who in ("graph", "whole_step", "inductor", "per_layer", "peer"):
        with tempfile.TemporaryDirectory() as cache:
            cold = _run(who, layers, cache)
            warm = _run(who, layers, cache)
        found[who] = {"cold": cold["first"], "warm": warm["first"], "step": warm["second"]}
        line = {"bench": report.bench, "case": {"layers": layers, "mode": who}, "seconds": found[who]}
        if report.as_json:
            print(json.dumps(line), flush=True)
        else:
            times = " ".join(f"{name} {value:7.2f} s" for name, value in found[who].items())
            print(f"{who:12} {times}", flush=True)
    numbers = {
        f"{who}_{when}_over_peer": found[who][when] / found["peer"][when]
        for who in found
        if who != "peer"
        for when in ("cold", "warm")
    }
    report.summary(numbers | {f"{who}_warm_seconds": found[who]["warm"] for who in found})
