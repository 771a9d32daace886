"""Forward and dX of a linear layer on packed weights, against bf16 (oneDNN) and bitsandbytes.

Shapes of Llama-3.1-8B and Qwen3-0.6B; for the formats of gpt-oss and DeepSeek theirs too. At 16 tokens or
fewer the weights rotate over more memory than the last-level cache holds, as they do in a model. `bf16` is
F.linear on dense weights, `fp32` the same in fp32: what is fastest without a unit for bf16;
`bitsandbytes` is what its matmul_4bit and its backward do: dequantise the whole
weight, then multiply. For the formats it lacks, `nf4` is ours on the same shape, double-quantised, and
`torchao` its dequantise and multiply, at 128 tokens by 4096 x 4096 only; groups of a row and ggml's blocks
have `nf4` alone. `tile_share` is the speed at 2048 tokens over the bare tile loop of the same rounds,
`vector_share` that over the bare loop of multiply-adds where there is no AMX.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import time
from collections.abc import Callable, Iterator

import torch

from monograph.bench.memory import recycle_large_blocks
from monograph.bench.report import Report
from monograph.bench.rounds import Paired, Work, geometric_mean, paired_rounds
from monograph.bench.weights import AbsmaxWeights, ElementWeights, RowWeights, Weights
from monograph.ops.formats import ABSMAX_FORMATS, BlockShape, format_named
from monograph.ops.linear import linear, linear_dx

LLAMA = [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)]
QWEN = [(1024, 1024), (3072, 1024), (1024, 3072)]
OTHERS = [(2880, 2880), (7168, 2048)]  # gpt-oss, DeepSeek-V3
TOKENS = [1, 4, 16, 64, 128, 512, 2048]
QUICK = ([(4096, 4096), (3072, 1024)], [1, 16, 128, 2048])


def last_level_cache() -> int:
    """Bytes of the largest cache, 32 MiB where the system does not say."""
    sizes = pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(s.read_text().rstrip("K\n")) * 1024 for s in sizes), default=32 << 20)


def _rotating(work: Callable[[int], object]) -> Work:
    counter = itertools.count()
    return lambda: work(next(counter))


def _works(weights: Weights, nf4: Weights | None, tokens: int, forward: bool) -> dict[str, Work]:
    rows, cols = weights.shape
    x = torch.randn(tokens, cols if forward else rows).bfloat16()

    def packed(which: Weights, i: int) -> object:
        values, scales = which.packed(i)
        return (linear if forward else linear_dx)(x, values, scales, which.layout)

    def bf16(i: int) -> object:
        dense = weights.dense[i % weights.dense.shape[0]]
        return torch.nn.functional.linear(x, dense) if forward else x @ dense

    def peer(i: int) -> object:
        dense = weights.peer_dense(i)
        return torch.nn.functional.linear(x, dense) if forward else x @ dense

    works = {"ours": _rotating(lambda i: packed(weights, i)), "bf16": _rotating(bf16)}
    if nf4 is not None:
        works["nf4"] = _rotating(lambda i: packed(nf4, i))
    if nf4 is None or (weights.peer and tokens == 128 and weights.shape == (4096, 4096)):
        works[weights.peer] = _rotating(peer)
    wide, dense = x.float(), weights.dense[: 2 if tokens <= 16 else 1].float()

    def fp32(i: int) -> object:
        one = dense[i % dense.shape[0]]
        return torch.nn.functional.linear(wide, one) if forward else wide @ one

    works["fp32"] = _rotating(fp32)
    return works


def _cases(arguments: argparse.Namespace) -> Iterator[tuple[int, int, int]]:
    others = [] if arguments.format in ABSMAX_FORMATS else OTHERS
    shapes, tokens = QUICK if arguments.quick else (LLAMA + QWEN, TOKENS)
    shapes = [s for s in shapes + others if not arguments.case or f"{s[0]}x{s[1]}" in arguments.case]
    tokens = arguments.tokens or tokens
    yield from ((rows, cols, m) for rows, cols in shapes for m in tokens)


def _measure(
    arguments: argparse.Namespace, rows: int, cols: int, m: int, forward: bool, plain: bool
) -> Paired:
    copies = 1
    if m <= 16:
        bits = format_named(arguments.format).bits
        copies = -(-int(1.2 * last_level_cache()) // (rows * cols * bits // 8))
    weights: Weights
    nf4: Weights | None = None
    if arguments.format in ABSMAX_FORMATS:
        weights = AbsmaxWeights(rows, cols, copies, not plain, arguments.format)
    else:
        by_rows = format_named(arguments.format).shape in (BlockShape.GROUP, BlockShape.INTERLEAVED)
        weights = (RowWeights if by_rows else ElementWeights)(rows, cols, copies, arguments.format)
        nf4 = AbsmaxWeights(rows, cols, copies, True, "nf4")
    rounds = 5 if arguments.quick else 7
    works = _works(weights, nf4, m, forward)
    if arguments.peers is not None:
        works = {name: work for name, work in works.items() if name in ("ours", *arguments.peers)}
    clock = time.thread_time if arguments.processor_time else time.perf_counter
    return paired_rounds(works, "ours", rounds, least_ms=5.0, watch_limit=True, clock=clock)


def _summary(report: Report) -> dict[str, float]:
    groups: dict[str, list[float]] = {}
    for line in report.lines:
        case, ratio = line["case"], line["ratio"]
        name = f"{case['pass']}_{case['threads']}_threads"
        if case["malloc"] == "raised":
            if case["m"] <= 128 and "bitsandbytes" in ratio:
                groups.setdefault(f"{name}_bitsandbytes_malloc_raised_m_to_128", []).append(
                    ratio["bitsandbytes"]
                )
            continue
        for peer in ("bf16", "fp32"):
            if peer in ratio and case["m"] >= 128:
                groups.setdefault(f"{name}_{peer}_m_from_128", []).append(ratio[peer])
            if peer in ratio and case["m"] <= 16:
                groups.setdefault(f"{name}_{peer}_m_to_16", []).append(ratio[peer])
        for peer in ("nf4", "torchao"):
            if peer in ratio and case["m"] >= 128:
                groups.setdefault(f"{name}_{peer}_m_from_128", []).append(ratio[peer])
            if peer in ratio and case["m"] <= 16:
                groups.setdefault(f"{name}_{peer}_m_to_16", []).append(ratio[peer])
                if "bf16" in ratio:
                    less = ratio["bf16"] / ratio[peer]
                    groups.setdefault(f"{name}_nf4_over_bf16_m_to_16", []).append(less)
        if case["m"] <= 128 and "bitsandbytes" in ratio:
            groups.setdefault(f"{name}_bitsandbytes_m_to_128", []).append(ratio["bitsandbytes"])
        for limit in ("tile", "vector"):
            if case["m"] == 2048 and (fastest := line.get(f"{limit}_tflops")):
                speed = 2 * case["m"] * case["n"] * case["k"] / line["ours_ms"] / 1e9
                groups.setdefault(f"{name}_{limit}_share_m_2048", []).append(speed / fastest)
    return {name: geometric_mean(values) for name, values in groups.items()}


def run(arguments: argparse.Namespace, report: Report) -> None:
    import bitsandbytes  # noqa: F401  (registers its ops)

    if arguments.processor_time and arguments.threads != [1]:
        raise SystemExit(
            f"linear: --processor-time counts one thread, --threads is {arguments.threads}, wanted 1"
        )
    # Only bitsandbytes depends on the allocator.
    for malloc in ("default", "raised") if arguments.format in ABSMAX_FORMATS else ("default",):
        if malloc == "raised":
            recycle_large_blocks()
        for threads in arguments.threads if malloc == "default" else arguments.threads[:1]:
            torch.set_num_threads(threads)
            for rows, cols, m in _cases(arguments):
                if malloc == "raised" and m > 128:
                    continue
                for name in ("forward", "dx"):
                    with torch.inference_mode():
                        result = _measure(arguments, rows, cols, m, name == "forward", arguments.plain)
                    case = {"m": m, "n": rows, "k": cols, "format": arguments.format, "dtype": "bfloat16"}
                    case |= {"threads": threads, "pass": name, "malloc": malloc}
                    if arguments.processor_time:
                        case["clock"] = "processor"
                    report.case(case, result, "ours")
    report.summary(_summary(report))
    if arguments.plot:
        from monograph.bench.plot import plot_linear

        plot_linear(report.lines, arguments.plot)
