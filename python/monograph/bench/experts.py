"""A layer of experts with LoRA on both projections, forward and backward, against what people run today.

Peers, each a process of its own that is stopped while the others run (kt-kernel's threads spin):
`grouped_mm_peft` is transformers' grouped_mm under PEFT's target_parameters, `kt_*` kt-kernel's experts in
bf16, int8 and MXFP4. Ours runs here, also as `without_lora`, as `linears` (`linear` and `linear_dx` of every
expert on as many rows, without LoRA: what the products alone cost) and as `eighth` (an eighth of the experts
is here and the other slots are skipped, as a rank of eight would). A ratio is speed-up over the peer.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
from collections.abc import Iterator

import torch

from monograph import PackedWeight, quantize
from monograph.bench.contenders import Contender
from monograph.bench.experts_case import WIDTHS, Width, batch, factors, random_stack
from monograph.bench.experts_contender import KT_METHODS
from monograph.bench.report import Report
from monograph.bench.rounds import Work, geometric_mean, paired_rounds
from monograph.ops.experts import experts
from monograph.ops.linear import linear, linear_dx

MODULE = "monograph.bench.experts_contender"
ALPHA = 2.0  # lora_alpha over r


class Stopped:
    """A contender that runs only while it is asked."""

    def __init__(self, job: dict[str, object]) -> None:
        self.contender = Contender(job, MODULE)
        os.kill(self.contender.process.pid, signal.SIGSTOP)

    def __call__(self) -> object:
        os.kill(self.contender.process.pid, signal.SIGCONT)
        answer = self.contender.ask("step")
        os.kill(self.contender.process.pid, signal.SIGSTOP)
        return answer

    def end(self) -> None:
        os.kill(self.contender.process.pid, signal.SIGKILL)
        self.contender.process.wait()


def pack_layer(width: Width, format: str) -> tuple[PackedWeight, PackedWeight]:
    """Both weights, [E, 2I, H] and [E, H, I]."""
    double = format == "nf4"
    shapes = [(width.experts, 2 * width.inner, width.hidden), (width.experts, width.hidden, width.inner)]
    packed = [
        quantize(random_stack(*shape, i), format, double_quant=double) for i, shape in enumerate(shapes)
    ]
    return packed[0], packed[1]


def _step(width: Width, weights: tuple[PackedWeight, PackedWeight], tokens: int, rank: int, forward: bool,
          reach: int | None = None) -> Work:  # fmt: skip
    x, dy, ids, routed = batch(width, tokens)
    x.requires_grad_()
    routed.requires_grad_()
    if reach is not None:  # experts that are elsewhere
        ids = torch.where(ids < reach, ids, width.experts)
    low = factors(width, rank) if rank else []
    pairs = [(low[0], low[1], ALPHA), (low[2], low[3], ALPHA)] if rank else [None, None]
    biases = (torch.zeros(width.experts, 2 * width.inner), torch.zeros(width.experts, width.hidden))
    first, second = ((w.values, list(w.scales), w.layout) for w in weights)

    def run() -> object:
        y = experts(
            x, ids, routed, first, second, lora1=pairs[0], lora2=pairs[1], activation=width.activation,
            interleaved=width.interleaved, bias=biases if width.bias else (None, None), save=not forward,
        )  # fmt: skip
        return y if forward else torch.autograd.grad(y, [x, routed, *low], dy)

    return run


def _linears(width: Width, weights: tuple[PackedWeight, PackedWeight], tokens: int, forward: bool) -> Work:
    _, _, ids, _ = batch(width, tokens)
    counts = torch.bincount(ids.flatten(), minlength=width.experts).tolist()
    matrices = []
    for weight in weights:
        _, rows, _ = weight.shape
        slices = [weight.slice_rows(e * rows, rows) for e in range(width.experts)]
        matrices.append([(s.values, list(s.scales), s.layout) for s in slices])
    left = {
        cols: torch.randn(max(counts), cols).bfloat16()
        for cols in (width.hidden, width.inner, 2 * width.inner)
    }

    def run() -> object:
        for e, count in enumerate(counts):
            if count == 0:
                continue
            first, second = matrices[0][e], matrices[1][e]
            linear(left[width.hidden][:count], *first)
            linear(left[width.inner][:count], *second)
            if not forward:
                linear_dx(left[width.hidden][:count], *second)
                linear_dx(left[2 * width.inner][:count], *first)
        return None

    return run


def _cases(arguments: argparse.Namespace) -> Iterator[tuple[str, str, int, str, int]]:
    formats = ("mxfp4", "nf4")
    lengths = arguments.tokens or ([512] if arguments.quick else [1, 16, 128, 512, 2048, 4096])
    for threads in arguments.threads:
        for width in WIDTHS:
            for format in formats:
                for tokens in lengths:
                    yield width, format, tokens, "step", threads
                if 1 in lengths:
                    yield width, format, 1, "forward", threads


def _peers(arguments: argparse.Namespace, width: str, tokens: int) -> list[str]:
    peers = ["grouped_mm_peft"]
    if importlib.util.find_spec("kt_kernel") is not None:
        peers += [name for name in KT_METHODS if tokens <= 512 or name != "kt_mxfp4"]
    return [name for name in peers if arguments.peers is None or name in arguments.peers]


def run(arguments: argparse.Namespace, report: Report) -> None:
    rank, groups = 16, {}  # type: tuple[int, dict[str, list[float]]]
    rounds = 3 if arguments.quick else 5
    packed: dict[tuple[str, str], tuple[PackedWeight, PackedWeight]] = {}
    if importlib.util.find_spec("kt_kernel") is None:
        print("# kt_kernel is not installed: pip install --no-deps kt-kernel==0.7.2 gguf", flush=True)
    for name, format, tokens, which, threads in _cases(arguments):
        width, forward = WIDTHS[name], which == "forward"
        if arguments.case and name not in arguments.case:
            continue
        weights = packed.setdefault((name, format), pack_layer(width, format))
        torch.set_num_threads(threads)
        works: dict[str, Work] = {
            "ours": _step(width, weights, tokens, rank, forward),
            "without_lora": _step(width, weights, tokens, 0, forward),
            "linears": _linears(width, weights, tokens, forward),
            "eighth": _step(width, weights, tokens, rank, forward, width.experts // 8),
        }
        job = {"width": name, "tokens": tokens, "rank": rank, "threads": threads, "pass": which}
        peers = {peer: Stopped({**job, "peer": peer}) for peer in _peers(arguments, name, tokens)}
        try:
            result = paired_rounds({**works, **peers}, "ours", rounds, least_ms=20.0, watch_limit=True)
        finally:
            for process in peers.values():
                process.end()
        case = {"width": name, "tokens": tokens, "format": format, "rank": rank, "pass": which}
        report.case(case | {"threads": threads}, result, "ours")
        for peer, ratio in result.ratio.items():
            groups.setdefault(f"{name}_{tokens}_{which}_{peer}_{threads}_threads", []).append(ratio)
    report.summary({name: geometric_mean(values) for name, values in groups.items()})
