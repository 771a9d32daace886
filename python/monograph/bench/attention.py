"""Attention over packed documents, forward and backward, bf16, against SDPA.

`sdpa_dense` is one call with a block mask, `sdpa_loop` one causal call per document, `sdpa_causal` the plain
causal call where there is one document. `tile_share` is the useful work (the visible half of each document's
square) over the bare tile loop of the same rounds, `vector_share` that over the bare loop of multiply-adds
where there is no AMX. `decode` is one query against a long past, forward only.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F

from monograph.bench.peak_memory import peak_bytes
from monograph.bench.report import Report
from monograph.bench.rounds import Work, geometric_mean, paired_rounds
from monograph.ops.varlen_attention import varlen_attention

HEADS, SIZE = 16, 128


def log_normal_lengths(total: int, mean: int = 350) -> list[int]:
    """Document lengths with this mean that fill `total` tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < total:
        draw = torch.randn((), generator=generator).mul(0.8).exp().item() * mean / 1.377
        lengths.append(max(1, min(int(draw), total - sum(lengths))))
    return lengths


def _offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def _leaves(tokens: int, kv_heads: int) -> list[torch.Tensor]:
    return [torch.randn(tokens, h, SIZE).bfloat16().requires_grad_() for h in (HEADS, kv_heads, kv_heads)]


def _step(out: torch.Tensor, leaves: list[torch.Tensor], dout: torch.Tensor) -> object:
    return torch.autograd.grad(out, leaves, dout)


def _works(lengths: list[int], kv_heads: int, dense: bool) -> dict[str, Work]:
    tokens = sum(lengths)
    leaves = _leaves(tokens, kv_heads)
    dout = torch.randn(tokens, HEADS, SIZE).bfloat16()
    cu = _offsets(lengths)
    pieces = list(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True))

    def sdpa(begin: int, end: int, **options: Any) -> torch.Tensor:
        q, k, v = (t[begin:end].transpose(0, 1)[None] for t in leaves)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)

    def ours() -> object:
        q, k, v = leaves
        return _step(varlen_attention(q, k, v, cu), leaves, dout)

    def loop() -> object:
        parts = [sdpa(begin, end, is_causal=True) for begin, end in pieces]
        return _step(torch.cat(parts, dim=2)[0].transpose(0, 1), leaves, dout)

    works: dict[str, Work] = {"ours": ours, "sdpa_causal" if len(lengths) == 1 else "sdpa_loop": loop}
    if dense:
        document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        mask = (document[:, None] == document[None, :]).tril()

        def masked() -> object:
            return _step(sdpa(0, tokens, attn_mask=mask)[0].transpose(0, 1), leaves, dout)

        works["sdpa_dense"] = masked
    return works


def _decode_works(past: int, kv_heads: int) -> dict[str, Work]:
    q, k, v = (
        torch.randn(1, HEADS, SIZE),
        torch.randn(past, kv_heads, SIZE),
        torch.randn(past, kv_heads, SIZE),
    )
    q, k, v = (t.bfloat16() for t in (q, k, v))
    cu_q, cu_k = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, past], dtype=torch.int32)
    qh, kh, vh = (t.transpose(0, 1)[None].contiguous() for t in (q, k, v))
    return {
        "ours": lambda: varlen_attention(q, k, v, cu_q, cu_k),
        "sdpa_causal": lambda: F.scaled_dot_product_attention(qh, kh, vh, enable_gqa=True),
    }


def _useful_flops(lengths: list[int]) -> float:
    """Forward 2 and backward 5 products over the visible half of each square."""
    return sum(7 * 2 * HEADS * SIZE * n * (n + 1) / 2 for n in lengths)


def _memory_ratio() -> float:
    """Peak memory of the dense way over ours, beyond the output and the three gradients that both must hold;
    each in a process of its own."""
    setup = """
from monograph.bench.attention import _works, log_normal_lengths
works = _works(log_normal_lengths(16384), 16, {dense})
_works([64, 64], 16, True)["{name}"]()  # code and thread pool
"""
    dense, ours = (
        peak_bytes(setup.format(name=name, dense=dense), f"works['{name}']()")
        for name, dense in (("sdpa_dense", True), ("ours", False))
    )
    mask = 16384 * 16384  # made by the setup, and part of what the dense way needs
    results = 4 * 16384 * HEADS * SIZE * 2
    return (dense + mask - results) / (ours - results)


def run(arguments: argparse.Namespace, report: Report) -> None:
    cases: list[tuple[str, list[int], bool]] = [("8x512", [512] * 8, True), ("1x4096", [4096], False)]
    if not arguments.quick:
        cases.append(("log-normal 16k", log_normal_lengths(16384), True))
    groups: dict[str, list[float]] = {}
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for kv_heads in (16, 4):
            for name, lengths, dense in cases:
                rounds = 3 if len(lengths) > 8 or arguments.quick else 7
                works = _works(lengths, kv_heads, dense)
                result = paired_rounds(works, "ours", rounds, least_ms=1.0, watch_limit=True)
                case: dict[str, Any] = {"lengths": name, "heads": HEADS, "kv_heads": kv_heads}
                report.case(case | {"head_dim": SIZE, "threads": threads}, result, "ours")
                key = f"{name.replace(' ', '_')}_kv{kv_heads}_{threads}_threads"
                for peer, ratio in result.ratio.items():
                    groups.setdefault(f"{key}_{peer}", []).append(ratio)
                speed = _useful_flops(lengths) / result.best_ms["ours"] / 1e9
                limits = {"tile": result.tile_tflops, "vector": result.vector_tflops}
                for limit, fastest in limits.items():
                    if fastest:
                        groups.setdefault(f"{key}_{limit}_share", []).append(speed / fastest)
            with torch.inference_mode():
                result = paired_rounds(_decode_works(8192, kv_heads), "ours", 15)
            case = {"lengths": "decode 1 of 8192", "heads": HEADS, "kv_heads": kv_heads, "head_dim": SIZE}
            report.case(case | {"threads": threads}, result, "ours")
            groups.setdefault(f"decode_kv{kv_heads}_{threads}_threads_sdpa", []).append(
                result.ratio["sdpa_causal"]
            )
    summary = {name: geometric_mean(values) for name, values in groups.items()}
    if not arguments.quick:
        summary["log-normal_16k_memory_sdpa_dense"] = _memory_ratio()
    report.summary(summary)
