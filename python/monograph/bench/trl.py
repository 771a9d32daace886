"""Steps of TRL's SFT, DPO and GRPO trainers on our layers, against the same script with bitsandbytes.

4 layers of Qwen3-0.6B width with its vocabulary, NF4 double-quantised, r = 16 on all linears, TRL's defaults
(bf16 autocast, checkpointing). What differs is how the model is loaded, and `mg.optimize(trainer.model)`.
SFT: 2 rows of 512 tokens. DPO: one pair of 512. GRPO: 4 answers of 32 tokens to a prompt of 128, generation
included. A step ends with the optimiser's. Both sides are processes and step in turn; `--case sft` takes one
trainer, `--peers compiled` lets both sides run under `torch_compile=True` instead of eager.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import tempfile
from typing import Any

from monograph.bench.contenders import Contender, Measured, compare
from monograph.bench.report import Report
from monograph.bench.rounds import Paired, geometric_mean
from monograph.bench.step import QWEN, make_folder

MODULE = "monograph.bench.trl_contender"
KINDS = ("sft", "dpo", "grpo")
WAYS = ("eager", "compiled")


def sizes(quick: bool) -> dict[str, int]:
    if quick:
        return {"rows": 2, "length": 64, "prompt": 32, "answer": 8, "answers": 2}
    return {"rows": 2, "length": 512, "prompt": 128, "answer": 32, "answers": 4}


def config(quick: bool) -> dict[str, Any]:
    return QWEN | ({"num_hidden_layers": 2, "vocab_size": 32000} if quick else {"num_hidden_layers": 4})


def measure(job: dict[str, Any], rounds: int) -> dict[str, Measured]:
    ours = Contender(job | {"contender": "ours"}, MODULE)
    found = {"ours": Measured(ours.start)}
    peer = Contender(job | {"contender": "bitsandbytes"}, MODULE)
    loss, own_loss = peer.start["loss"], ours.start["loss"]
    # GRPO's first loss is about 0, of tokens that were drawn.
    if job["kind"] != "grpo" and abs(loss / own_loss - 1) > 0.01:
        raise RuntimeError(f"{job['kind']}: first loss of bitsandbytes {loss}, ours {own_loss}")
    found["bitsandbytes"] = compare(ours, found["ours"], peer, rounds)
    ours.end()
    found["ours"].peak = ours.peak
    return found


def run(arguments: argparse.Namespace, report: Report) -> None:
    summary: dict[str, float] = {}
    ratios: list[float] = []
    ways = [way for way in WAYS if way in (arguments.peers or ["eager"])]
    kinds = [kind for kind in KINDS if kind in (arguments.case or KINDS)]
    if not ways or not kinds:
        raise ValueError(f"--case wants some of {', '.join(KINDS)}, --peers some of {', '.join(WAYS)}")
    with tempfile.TemporaryDirectory() as temporary:
        root = pathlib.Path(arguments.folder or temporary) / ("trl_quick" if arguments.quick else "trl")
        folder = make_folder(config(arguments.quick), root)
        for way in ways:
            for kind in kinds:
                for threads in arguments.threads[:1] if arguments.quick else arguments.threads:
                    job = {"folder": folder, "kind": kind, "threads": threads, "compiled": way == "compiled"}
                    found = measure(job | sizes(arguments.quick), 3 if arguments.quick else 7)
                    peer = found["bitsandbytes"]
                    ratio = statistics.median(peer.ratio)
                    best = {name: min(contender.ms) for name, contender in found.items()}
                    case = {"trainer": kind, "way": way, "threads": threads}
                    report.case(case, Paired(best, {"bitsandbytes": ratio}, 0, 0.0), "ours")
                    ratios.append(ratio)
                    summary |= numbers(f"{kind}_{way}_{threads}_threads", found, ratio)
                    print(f"  {kind} {way}: {ratio:.2f}x", file=sys.stderr, flush=True)
    summary["bitsandbytes_over_ours"] = geometric_mean(ratios)
    summary["least_bitsandbytes_over_ours"] = min(ratios)
    report.summary(summary)


def numbers(prefix: str, found: dict[str, Measured], ratio: float) -> dict[str, float]:
    ours, peer = found["ours"], found["bitsandbytes"]
    return {
        f"{prefix}_seconds": statistics.median(ours.ms) / 1e3,
        f"{prefix}_bitsandbytes_seconds": statistics.median(peer.ms) / 1e3,
        f"{prefix}_ratio": ratio,
        f"{prefix}_processor_time_ratio": statistics.median(peer.processor_ratio),
        f"{prefix}_first_step_seconds": ours.start["first_step_s"],
        f"{prefix}_bitsandbytes_first_step_seconds": peer.start["first_step_s"],
        f"{prefix}_peak_MiB": ours.peak / 2**20,
        f"{prefix}_bitsandbytes_peak_MiB": peer.peak / 2**20,
    }
