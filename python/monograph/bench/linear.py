"""Forward and dX of a linear layer on packed weights, against bf16 (oneDNN) and bitsandbytes.

Shapes of Llama-3.1-8B and Qwen3-0.6B. At 16 tokens or fewer the weights rotate over more memory than the
last-level cache holds, as they do in a model. `bf16` is F.linear on dense weights; `bitsandbytes` is what its
matmul_4bit and its backward do: dequantise the whole weight, then multiply. `tile_share` is the speed at 2048
tokens over the bare tile loop of the same rounds.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
from collections.abc import Callable, Iterator

import torch

from monograph.bench.memory import recycle_large_blocks
from monograph.bench.report import Report
from monograph.bench.rounds import Paired, Work, geometric_mean, paired_rounds
from monograph.formats import SCALE_GROUP, format_named
from monograph.ops.linear import linear, linear_dx
from monograph.ops.quantize import dynamic_map

LLAMA = [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)]
QWEN = [(1024, 1024), (3072, 1024), (1024, 3072)]
TOKENS = [1, 4, 16, 64, 128, 512, 2048]
QUICK = ([(4096, 4096), (3072, 1024)], [1, 16, 128, 2048])
BLOCK = 64


def last_level_cache() -> int:
    """Bytes of the largest cache, 32 MiB where the system does not say."""
    sizes = pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(s.read_text().rstrip("K\n")) * 1024 for s in sizes), default=32 << 20)


class Weights:
    """`copies` random packed weights of one shape and the dense and bitsandbytes forms of the same."""

    def __init__(self, rows: int, cols: int, copies: int, double_quant: bool, fmt: str) -> None:
        self.layout = [format_named(fmt).number, BLOCK, rows, cols]
        self.shape = (rows, cols)
        blocks = rows * cols // BLOCK
        groups = -(-blocks // SCALE_GROUP)
        self.values = torch.randint(0, 256, (copies, rows, cols // 2), dtype=torch.uint8)
        self.codes = torch.randint(0, 256, (copies, blocks), dtype=torch.uint8)
        self.groups = (torch.rand(copies, groups) * 0.01).view(torch.uint8)
        self.absmax = torch.rand(copies, blocks) * 0.1
        self.map = dynamic_map().view(torch.uint8)
        self.offset = torch.tensor([0.05]).view(torch.uint8)
        self.double_quant = double_quant
        self.fmt = fmt
        dense_copies = max(1, -(-copies // 4))
        self.dense = (torch.randn(dense_copies, rows, cols) * 0.02).bfloat16()

    def packed(self, i: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        i %= self.values.shape[0]
        if self.double_quant:
            return self.values[i], [self.codes[i], self.groups[i], self.map, self.offset]
        return self.values[i], [self.absmax[i].view(torch.uint8)]

    def bitsandbytes_dense(self, i: int) -> torch.Tensor:
        """The weight as bitsandbytes dequantises it on each use, nested scales included."""
        i %= self.values.shape[0]
        ops = torch.ops.bitsandbytes
        absmax = self.absmax[i]
        if self.double_quant:
            absmax = ops.dequantize_blockwise(
                self.codes[i], self.groups[i].view(torch.float32), dynamic_map(), SCALE_GROUP, torch.float32
            )
            absmax = absmax + 0.05
        packed = self.values[i].reshape(-1, 1)
        return ops.dequantize_4bit(packed, absmax, BLOCK, self.fmt, self.shape, torch.bfloat16)


def _rotating(work: Callable[[int], object]) -> Work:
    counter = itertools.count()
    return lambda: work(next(counter))


def _works(weights: Weights, tokens: int, forward: bool) -> dict[str, Work]:
    rows, cols = weights.shape
    x = torch.randn(tokens, cols if forward else rows).bfloat16()

    def ours(i: int) -> object:
        values, scales = weights.packed(i)
        return (linear if forward else linear_dx)(x, values, scales, weights.layout)

    def bf16(i: int) -> object:
        dense = weights.dense[i % weights.dense.shape[0]]
        return torch.nn.functional.linear(x, dense) if forward else x @ dense

    def bitsandbytes(i: int) -> object:
        dense = weights.bitsandbytes_dense(i)
        return torch.nn.functional.linear(x, dense) if forward else x @ dense

    return {"ours": _rotating(ours), "bf16": _rotating(bf16), "bitsandbytes": _rotating(bitsandbytes)}


def _cases(arguments: argparse.Namespace) -> Iterator[tuple[int, int, int]]:
    shapes, tokens = QUICK if arguments.quick else (LLAMA + QWEN, TOKENS)
    yield from ((rows, cols, m) for rows, cols in shapes for m in tokens)


def _measure(
    arguments: argparse.Namespace, rows: int, cols: int, m: int, forward: bool, plain: bool
) -> Paired:
    copies = 1
    if m <= 16:
        copies = -(-int(1.2 * last_level_cache()) // (rows * cols // 2))
    weights = Weights(rows, cols, copies, not plain, arguments.format)
    rounds = 5 if arguments.quick else 7
    return paired_rounds(_works(weights, m, forward), "ours", rounds, least_ms=5.0, watch_tiles=True)


def _summary(report: Report) -> dict[str, float]:
    groups: dict[str, list[float]] = {}
    for line in report.lines:
        case, ratio = line["case"], line["ratio"]
        name = f"{case['pass']}_{case['threads']}_threads"
        if case["malloc"] == "raised":
            if case["m"] <= 128:
                groups.setdefault(f"{name}_bitsandbytes_malloc_raised_m_to_128", []).append(
                    ratio["bitsandbytes"]
                )
            continue
        if case["m"] >= 128:
            groups.setdefault(f"{name}_bf16_m_from_128", []).append(ratio["bf16"])
        if case["m"] <= 16:
            groups.setdefault(f"{name}_bf16_m_to_16", []).append(ratio["bf16"])
        if case["m"] <= 128:
            groups.setdefault(f"{name}_bitsandbytes_m_to_128", []).append(ratio["bitsandbytes"])
        if case["m"] == 2048 and line.get("tile_tflops"):
            speed = 2 * case["m"] * case["n"] * case["k"] / line["ours_ms"] / 1e9
            groups.setdefault(f"{name}_tile_share_m_2048", []).append(speed / line["tile_tflops"])
    return {name: geometric_mean(values) for name, values in groups.items()}


def run(arguments: argparse.Namespace, report: Report) -> None:
    import bitsandbytes  # noqa: F401  (registers its ops)

    for malloc in ("default", "raised"):
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
                    report.case(case, result, "ours")
    report.summary(_summary(report))
    if arguments.plot:
        from monograph.bench.plot import plot_linear

        plot_linear(report.lines, arguments.plot)
