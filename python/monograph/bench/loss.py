"""The loss of the last hidden state and its gradient: head, cross entropy and back.

Heads of Llama-3.1-8B and Qwen3-0.6B in bf16, frozen. `transformers` is its own loss on the whole logits,
`trl` the chunked log-probabilities of TRL, `loop` chunks of 256 tokens in plain torch, computed again in
backward. Memory is the rise of the resident set over the inputs, in a process of its own.
"""

from __future__ import annotations

import argparse

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from monograph.bench.peak_memory import peak_bytes
from monograph.bench.report import Report
from monograph.bench.rounds import Work, geometric_mean, paired_rounds
from monograph.ops.linear_cross_entropy import linear_cross_entropy

HEADS = {"llama-3.1-8b": (128256, 4096), "qwen3-0.6b": (151936, 1024)}
TOKENS = 1024
CHUNK = 256
# trl's function takes chunks of the vocabulary; this is what its trainers pass.
TRL_CHUNK = 32768


def ours(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return linear_cross_entropy(x, weight, [], [0, 0, *weight.shape], labels).sum()


def transformers(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    from monograph.upstream.transformers_names import ForCausalLMLoss

    logits = F.linear(x, weight)
    return ForCausalLMLoss(
        logits, None, weight.shape[0], num_items_in_batch=torch.tensor(1), shift_labels=labels
    )


def trl(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    from monograph.upstream.trl_names import ChunkedLogProbFunction

    return -ChunkedLogProbFunction.apply(x, weight, None, labels, 1.0, TRL_CHUNK, None, 1.0, ())[0].sum()


def loop(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    def chunk(part: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(part, weight).float(), label, reduction="sum")

    parts = zip(x.split(CHUNK), labels.split(CHUNK), strict=True)
    return torch.stack([checkpoint(chunk, *part, use_reentrant=False) for part in parts]).sum()


CONTENDERS = {"ours": ours, "transformers": transformers, "trl": trl, "loop": loop}


def inputs(vocabulary: int, width: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(tokens, width).bfloat16().requires_grad_()
    weight = torch.empty(vocabulary, width, dtype=torch.bfloat16)
    for part in weight.split(4096):
        part.normal_(std=0.02)
    return x, weight, torch.randint(0, vocabulary, (tokens,))


def _works(vocabulary: int, width: int, tokens: int) -> dict[str, Work]:
    x, weight, labels = inputs(vocabulary, width, tokens)

    def step(name: str) -> Work:
        return lambda: torch.autograd.grad(CONTENDERS[name](x, weight, labels), x)

    return {name: step(name) for name in CONTENDERS}


def peak(name: str, vocabulary: int, width: int, tokens: int) -> int:
    """Bytes one contender needs besides x, weight and labels."""
    setup = f"""
from monograph.bench.loss import CONTENDERS, inputs
x, weight, labels = inputs({vocabulary}, {width}, {tokens})
def step(x, weight, labels):
    torch.autograd.grad(CONTENDERS[{name!r}](x, weight, labels), x)
step(x[:8], weight[:100], labels[:8] % 100)
"""
    return peak_bytes(setup, "step(x, weight, labels)")


def run(arguments: argparse.Namespace, report: Report) -> None:
    numbers: dict[str, list[float]] = {}
    tokens = CHUNK if arguments.quick else TOKENS
    for threads in arguments.threads[:1] if arguments.quick else arguments.threads:
        torch.set_num_threads(threads)
        for name, (vocabulary, width) in HEADS.items():
            if arguments.quick and name != "qwen3-0.6b":
                continue
            rounds = 3 if arguments.quick else 5
            result = paired_rounds(_works(vocabulary, width, tokens), "ours", rounds, watch_limit=True)
            case = {"m": tokens, "n": vocabulary, "k": width, "dtype": "bfloat16", "threads": threads}
            report.case(case, result, "ours")
            for peer, ratio in result.ratio.items():
                numbers.setdefault(f"{peer}_{threads}_threads", []).append(ratio)
    summary = {name: geometric_mean(ratios) for name, ratios in numbers.items()}
    if not arguments.quick:
        for name, (vocabulary, width) in HEADS.items():
            for contender in CONTENDERS:
                summary[f"{name}_peak_MiB_{contender}"] = peak(contender, vocabulary, width, tokens) / 2**20
    report.summary(summary)
