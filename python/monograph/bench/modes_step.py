"""Our default step against our other modes: graphs of regions, one flat graph by Inductor, no graph.

    python -m monograph.bench step --case modes_b --threads 2 --json

`modes_a` is 4 layers of Llama-3.1-8B's width with checkpointing, `modes_b` 8 layers of Qwen3-0.6B's. Each
mode is a process of its own; `graph` and one other are alive and step in turn. A ratio above 1 means that
`graph` is faster. `peak_MiB` is the largest sum of resident sets over the process tree, compilers included.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from monograph.bench.contenders import Contender, Measured, compare
from monograph.bench.report import Report
from monograph.bench.rounds import Paired

MODULE = "monograph.bench.step_contender"
OTHERS = ("inductor", "eager", "whole_step")
ROUNDS = {"modes_a": 3, "modes_b": 9}  # a step of (a) takes half a minute where the matrix unit is shared


def measure(case: str, job: dict[str, Any], report: Report) -> dict[str, float]:
    job = job | {"case": case, "contender": "ours"}
    ours = Contender(job | {"mode": "graph"}, MODULE)
    found = {"graph": Measured(ours.start)}
    for mode in OTHERS:
        found[mode] = compare(ours, found["graph"], Contender(job | {"mode": mode}, MODULE), ROUNDS[case])
        ratio = statistics.median(found[mode].ratio)
        print(f"  {case}: {mode} takes {ratio:.3f} of graph", file=sys.stderr, flush=True)
    ours.end()
    found["graph"].peak = ours.peak
    best = {mode: min(measured.ms) for mode, measured in found.items()}
    ratios = {mode: statistics.median(found[mode].ratio) for mode in OTHERS}
    line = {"case": case, "tokens": sum(job["lengths"]), "threads": job["threads"]}
    for mode, measured in found.items():
        line[f"{mode}_peak_MiB"] = round(measured.peak / 2**20, 1)
        line[f"{mode}_first_step_s"] = round(measured.start["first_step_s"], 2)
    report.case(line, Paired(best, ratios, 0, 0.0), "graph")
    return {f"{case}_{mode}_over_graph": ratios[mode] for mode in OTHERS}
