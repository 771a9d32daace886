"""Steps of TRL's SFT, DPO and GRPO trainers on our layers, against the same script with bitsandbytes.

4 layers of Qwen3-0.6B width with its vocabulary, NF4 double-quantised, r = 16 on all linears, TRL's defaults
(bf16 autocast, checkpointing). What differs is how the model is loaded, and `mg.optimize(trainer.model)`.
SFT: 2 rows of 512 tokens. DPO: one pair of 512. GRPO: 4 answers of 32 tokens to a prompt of 128, generation
included, whose share of the processor time is in the summary. A step ends with the optimiser's. Both sides
are processes and step in turn; `--case sft` takes one trainer, `--peers compiled` lets both sides run under
`torch_compile=True` instead of eager, `--steps` sets the rounds.

`--case logprobs` measures no time: how far the log-probabilities that GRPO trains tokens with are from those
they were drawn with, at temperature 1, over 1024 tokens of 4 steps (monograph.hf.trl.mismatch), on
two narrow layers. `graph` there is what a recipe runs.
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
LOG_PROBS = "logprobs"
# Two narrow layers: what is measured there takes no size to be seen.
NARROW = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
}
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
    scored = LOG_PROBS in (arguments.case or ())
    if not ways or not (kinds or scored):
        known = ", ".join((*KINDS, LOG_PROBS))
        raise ValueError(f"--case wants some of {known}, --peers some of {', '.join(WAYS)}")
    with tempfile.TemporaryDirectory() as temporary:
        root = pathlib.Path(arguments.folder or temporary) / ("trl_quick" if arguments.quick else "trl")
        if scored:
            summary |= log_probs(make_folder(QWEN | NARROW, root / LOG_PROBS), arguments)
        folder = make_folder(config(arguments.quick), root) if kinds else ""
        for way in ways:
            for kind in kinds:
                for threads in arguments.threads[:1] if arguments.quick else arguments.threads:
                    job = {"folder": folder, "kind": kind, "threads": threads, "compiled": way == "compiled"}
                    rounds = arguments.steps or (3 if arguments.quick else 7)
                    found = measure(job | sizes(arguments.quick), rounds)
                    peer = found["bitsandbytes"]
                    ratio = statistics.median(peer.ratio)
                    best = {name: min(contender.ms) for name, contender in found.items()}
                    case = {"trainer": kind, "way": way, "threads": threads}
                    report.case(case, Paired(best, {"bitsandbytes": ratio}, 0, 0.0), "ours")
                    ratios.append(ratio)
                    summary |= numbers(f"{kind}_{way}_{threads}_threads", found, ratio)
                    print(f"  {kind} {way}: {ratio:.2f}x", file=sys.stderr, flush=True)
    if ratios:
        summary["bitsandbytes_over_ours"] = geometric_mean(ratios)
        summary["least_bitsandbytes_over_ours"] = min(ratios)
    report.summary(summary)


def log_probs(folder: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Of each contender: tokens, how many differ, the largest difference and the mean."""
    job = {"folder": folder, "kind": "grpo", "threads": arguments.threads[0], "compiled": False, "watched": 4}
    job |= sizes(quick=True) | {"answers": 8, "answer": 32}
    found: dict[str, float] = {}
    for name, more in (
        ("ours_eager", {"contender": "ours"}),
        ("ours_graph", {"contender": "ours", "compiled": True, "regions": True}),
        ("bitsandbytes", {"contender": "bitsandbytes"}),
    ):
        contender = Contender(job | more, MODULE)
        contender.end()
        found |= {f"{LOG_PROBS}_{name}_{number}": value for number, value in contender.start.items()}
        print(f"  {name}: {contender.start}", file=sys.stderr, flush=True)
    return found


def numbers(prefix: str, found: dict[str, Measured], ratio: float) -> dict[str, float]:
    ours, peer = found["ours"], found["bitsandbytes"]
    shares = {
        f"{prefix}_generation_share": statistics.median(ours.generation),
        f"{prefix}_bitsandbytes_generation_share": statistics.median(peer.generation),
    }
    return (shares if any(ours.generation) else {}) | {
        f"{prefix}_seconds": statistics.median(ours.ms) / 1e3,
        f"{prefix}_bitsandbytes_seconds": statistics.median(peer.ms) / 1e3,
        f"{prefix}_ratio": ratio,
        f"{prefix}_processor_time_ratio": statistics.median(peer.processor_ratio),
        f"{prefix}_first_step_seconds": ours.start["first_step_s"],
        f"{prefix}_bitsandbytes_first_step_seconds": peer.start["first_step_s"],
        f"{prefix}_peak_MiB": ours.peak / 2**20,
        f"{prefix}_bitsandbytes_peak_MiB": peer.peak / 2**20,
    }
