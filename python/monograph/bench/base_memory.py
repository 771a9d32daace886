"""A base larger than memory: a Llama-3.1-8B in NF4 in 3 GiB, and with a disk as slow as the computation.

    python -m monograph.bench base_memory --folder DIR --threads 2 --json --record runs.jsonl

Steps of 1024 tokens, r = 16 on all linears, checkpointing; medians of five after one that is left out. Each
case is a process of its own, in control groups (cgroup v1, root), with the files put out of the page cache:

  free                no limit, plain mapping: the time of a step, C
  ahead               3 GiB, base_memory
  throttled_*         3 GiB, and a disk on which 2 (base - base_memory) bytes take 0.85 C: with base_memory,
                      with a plain mapping, with MADV_SEQUENTIAL

`--record` writes what was measured at once, a line for each case, and takes from it what is there already: an
interrupted run goes on, and `--case ahead` measures that case (and `free`, if it is not there). `--quick`: 12
layers of 0.25 GB in all, 256 tokens, three steps. `--tokens`, `--steps`: others. The last line computes a 70B
model from what was measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from statistics import median
from typing import Any

from monograph.bench.control_group import ControlGroup, device_of
from monograph.bench.recorded_run import RecordedRun
from monograph.bench.report import Report

CASES = ("ahead", "throttled_ahead", "throttled_plain", "throttled_sequential")
SHARE = 0.85  # of C that reading takes on the throttled disk
MARGIN = 192 << 20  # bytes of the limit that neither the base nor what the free run held may use
QUICK_MARGIN = 64 << 20  # less than the half of the base that must not fit
LEAST_BESIDE = 33 << 20  # bytes beside the largest unit: the head, with the last norm
QUICK: dict[str, Any] = {
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 8192,
}


def forget_pages(folder: pathlib.Path) -> None:
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def most_anonymous(process: subprocess.Popen[bytes]) -> int:
    """Waits for it. The most bytes that were not pages of files, looked at five times a second."""
    most = 0
    while True:
        try:
            process.wait(0.2)
            return most
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError, StopIteration), open(f"/proc/{process.pid}/status") as file:
                line = next(line for line in file if line.startswith("RssAnon:"))
                most = max(most, int(line.split()[1]) * 1024)


def contend(group: ControlGroup, folder: pathlib.Path, threads: int, **given: Any) -> dict[str, Any]:
    """Runs a case in its group: its steps, and the most memory that the group had."""
    forget_pages(folder)
    load = os.getloadavg()[0]
    with group:
        arguments = {"folder": str(folder), "threads": threads, **given}
        command = [sys.executable, "-m", "monograph.bench.base_memory_contender", json.dumps(arguments)]
        environ = os.environ | {"OMP_NUM_THREADS": str(threads)}
        with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as complained:
            # Before anything is imported: pages stay with the group that they were first charged to.
            process = subprocess.Popen(
                command, stdout=said, stderr=complained, env=environ, preexec_fn=group.join
            )
            anonymous = most_anonymous(process)
            said.seek(0)
            complained.seek(0)
            if process.returncode != 0:
                last = "\n".join(complained.read().strip().splitlines()[-3:])
                raise RuntimeError(f"{given['how']} ended with {process.returncode} (-9: no memory): {last}")
            found: dict[str, Any] = json.loads(said.read().splitlines()[-1])
        found |= {"most_anonymous": anonymous, "most_memory": group.most_memory}
        found |= {"load": load, "load_after": os.getloadavg()[0]}
    return found


def middle(found: dict[str, Any], name: str) -> float:
    return median(step[name] for step in found["steps"][1:])


def large_on_paper(seconds: float, parameters: float) -> dict[str, float]:
    """Llama-3.1-70B: 80 layers of 8192 and 28672, 8 heads of keys, NF4 with nested scales at 4.13 bits; the
    time of a step grows with the weights that it multiplies with."""
    layer = 8192 * (2 * 8192 + 2 * 1024) + 3 * 8192 * 28672
    head = 8192 * 128256
    base = 80 * layer * 4.127 / 8 + head * 2
    held = 18 * 2**30
    step = seconds * (80 * layer + head) / parameters
    return {
        "70b_base_gb": base / 1e9,
        "70b_base_memory_gb": held / 1e9,
        "70b_read_gb_per_step": 2 * (base - held) / 1e9,
        "70b_step_seconds": step,
        "70b_disk_mb_per_second": 2 * (base - held) / 1e6 / step,
    }


def _parameters(config: dict[str, Any]) -> float:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["head_dim"] * (2 * config["num_attention_heads"] + 2 * config["num_key_value_heads"])
    return config["num_hidden_layers"] * hidden * (heads + 3 * inner) + hidden * config["vocab_size"]


def _run_free(run: RecordedRun, **given: Any) -> dict[str, Any]:
    return run.case("free", given, lambda: contend(ControlGroup(), how="plain", base_memory=0, **given))


def _run_case(
    run: RecordedRun, case: str, limit: int, allowed: int, rate: int, **given: Any
) -> dict[str, Any]:
    throttled = case.startswith("throttled_")
    group = ControlGroup(limit, device_of(given["folder"]), rate) if throttled else ControlGroup(limit)
    settings = given | {"limit": limit, "allowed": allowed, "rate": rate if throttled else None}
    how = case.removeprefix("throttled_")
    return run.case(case, settings, lambda: contend(group, how=how, base_memory=allowed, **given))


def _losses(found: dict[str, Any]) -> list[tuple[float, float]]:
    return [(step["loss"], step["grad_norm"]) for step in found["steps"]]


def run(arguments: argparse.Namespace, report: Report) -> None:
    from monograph.bench.large_model import write_model

    quick = arguments.quick
    folder = pathlib.Path(arguments.folder or ("build/base-memory-quick" if quick else "build/large-model"))
    if not (folder / "model.safetensors.index.json").exists():
        write_model(folder, 12 if quick else 32, **(QUICK if quick else {}))
    config = json.loads((folder / "config.json").read_text())
    given: dict[str, Any] = {
        "folder": folder,
        "threads": max(arguments.threads),
        "steps": arguments.steps or (3 if quick else 5),
        "tokens": arguments.tokens[0] if arguments.tokens else 256 if quick else 1024,
    }
    recorded = RecordedRun(arguments.record)
    cases = arguments.case or ("free", *CASES)
    if unknown := set(cases) - {"free", *CASES}:
        raise SystemExit(f"--case is {','.join(sorted(unknown))}, wanted of free, {', '.join(CASES)}")
    free = _run_free(recorded, **given)
    seconds = middle(free, "seconds")
    files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    base = files - config["vocab_size"] * config["hidden_size"] * 2  # without the table of tokens
    head = config["vocab_size"] * config["hidden_size"] * 2
    margin = QUICK_MARGIN if quick else MARGIN
    limit = free["most_anonymous"] + base // 2 + margin if quick else 3 << 30
    # Not less than is refused: then the system takes pages of the base while activations are largest.
    allowed = max(limit - free["most_anonymous"] - margin, head + LEAST_BESIDE)
    bytes_a_step = 2 * (base - allowed)
    rate = int(bytes_a_step / (SHARE * seconds))
    report.summary(
        {
            "free_seconds": seconds,
            "free_most_anonymous_gib": free["most_anonymous"] / 2**30,
            "free_load": free["load"],
            "limit_gib": limit / 2**30,
            "base_gb": base / 1e9,
            "base_memory_gb": allowed / 1e9,
            "least_read_gb": bytes_a_step / 1e9,
            "disk_mb_per_second": rate / 1e6,
        }
    )
    for case in (name for name in CASES if name in cases):
        found = _run_case(recorded, case, limit, allowed, rate, **given)
        slower = max(seconds, bytes_a_step / rate) if case.startswith("throttled_") else seconds
        report.summary(
            {
                f"{case}_seconds": middle(found, "seconds"),
                f"{case}_over_free": middle(found, "seconds") / seconds,
                f"{case}_over_slower": middle(found, "seconds") / slower,
                f"{case}_read_gb": middle(found, "read") / 1e9,
                f"{case}_read_over_least": middle(found, "read") / bytes_a_step,
                f"{case}_waited_seconds": middle(found, "waited"),
                f"{case}_most_held_gb": found["most_held"] / 1e9,
                f"{case}_most_memory_gib": found["most_memory"] / 2**30,
                f"{case}_same_losses": float(_losses(found) == _losses(free)),
                f"{case}_load": found["load"],
            }
        )
        if case == "throttled_ahead" and arguments.plot:
            from monograph.bench.plot_overlap import plot_overlap

            plot_overlap(found["events"], arguments.plot)
    report.summary(large_on_paper(seconds, _parameters(config)))
