"""Steps of several adapters on one base, against as many single `graph` steps, and against as many processes.

    python -m monograph.bench many_step --threads 1
    python -m monograph.bench many_step --threads 1 --case 1x64,8x16 --steps 20 --json

A Llama of two layers, 1024 wide, in NF4; LoRA of rank 16 on all linear layers; each adapter has one document
a step. `apart` and `joined` are ManyStep's rows, `singles` the step of one adapter by TrainStep, made once
for each: what N processes need one after the other. Each is a process of its own; they step in turn, and a
ratio is the median over rounds of the singles' processor time over ours, so that more than 1 is a gain. Of
one adapter it says what ManyStep costs beside TrainStep. Memory: `above_MiB` is the peak over what the
interpreter and its libraries hold, `process_MiB` with them; N processes need N times what `singles` has.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import tempfile
from typing import Any

from monograph.bench.contenders import Contender
from monograph.bench.report import Report
from monograph.bench.rounds import Paired
from monograph.bench.step import make_folder

CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
    "vocab_size": 4096,
    "tie_word_embeddings": False,
}
COUNTS, TOKENS = (1, 4, 8), (16, 64, 256, 1024)
CONTENDERS = ("singles", "apart", "joined")
MODULE = "monograph.bench.many_step_contender"
_ROUNDS = {1: 61}  # of one adapter a few percent count
_FEWER = 9


def asked(cases: list[str] | None, quick: bool) -> list[tuple[int, int]]:
    """(adapters, tokens of each) of `--case 4x64`, or all. ValueError for what is no such case."""
    if not cases:
        return [(n, t) for n in COUNTS for t in TOKENS] if not quick else [(1, 16), (4, 16)]
    found = []
    for case in cases:
        count, _, tokens = case.partition("x")
        if not (count.isdecimal() and tokens.isdecimal() and int(count) and int(tokens)):
            raise ValueError(f"many_step: --case has {case!r}, wanted ADAPTERSxTOKENS, as 4x64")
        found.append((int(count), int(tokens)))
    return found


def measure(job: dict[str, Any], rounds: int, report: Report, *, profile: bool) -> None:
    contenders = {name: Contender(job | {"contender": name}, MODULE) for name in CONTENDERS}
    try:
        times: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
        for number in range(rounds):
            for place in range(len(CONTENDERS)):  # each is first as often, and never steps twice in a row
                name = CONTENDERS[(place + number) % len(CONTENDERS)]
                times[name].append(contenders[name].ask("step"))
        memory = {name: contender.ask("memory") for name, contender in contenders.items()}
        if profile:
            for name, contender in contenders.items():
                for operator, ms, calls in contender.ask("profile")["profile"][:12]:
                    print(f"  {name:8} {operator:48} {ms:8.1f} ms {calls}")
    finally:
        for contender in contenders.values():
            contender.end()
    count = job["adapters"]
    case = {"adapters": count, "tokens": job["tokens"], "threads": job["threads"], "rounds": rounds}
    for name in CONTENDERS:
        cpu = [step["cpu_ms"] for step in times[name]]
        case |= {f"{name}_cpu_ms": round(statistics.median(cpu), 3)}
        case |= {f"{name}_above_MiB": round(memory[name]["above_MiB"], 1)}
        case |= {f"{name}_process_MiB": round(memory[name]["process_MiB"], 1)}
        case |= {f"{name}_first_step_s": round(contenders[name].start["first_step_s"], 2)}
    case["processes_MiB"] = round(count * memory["singles"]["process_MiB"], 1)
    case["load"] = round(os.getloadavg()[0], 1)
    ratio = {
        name: statistics.median(
            one["cpu_ms"] / ours["cpu_ms"] for one, ours in zip(times["singles"], times[name], strict=True)
        )
        for name in CONTENDERS[1:]
    }
    best = {name: min(step["cpu_ms"] for step in times[name]) for name in CONTENDERS}
    report.case(case, Paired(best, ratio, 0, 0.0), "singles")
    report.summary({f"{name}_{count}_adapters_{job['tokens']}_tokens": gain for name, gain in ratio.items()})


def run(arguments: argparse.Namespace, report: Report) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = make_folder(CONFIG, pathlib.Path(arguments.folder or made) / "many_step")
        for threads in arguments.threads:
            for count, tokens in asked(arguments.case, arguments.quick):
                rounds = arguments.steps or (5 if arguments.quick else _ROUNDS.get(count, _FEWER))
                job = {"folder": folder, "threads": threads, "adapters": count, "tokens": tokens}
                measure(job | {"mode": arguments.mode}, rounds, report, profile=arguments.profile)
