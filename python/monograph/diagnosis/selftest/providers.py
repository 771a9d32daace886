"""Everybody who can compute an operator on the device, against the CPU's kernels and, in time, each other."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from monograph.diagnosis.selftest.bit_patterns import floats, words
from monograph.diagnosis.selftest.case import Case, Figures, require
from monograph.diagnosis.selftest.device import Device
from monograph.ops.causal_conv1d import causal_conv1d
from monograph.ops.experts import experts
from monograph.ops.gated_delta_rule import gated_delta_rule
from monograph.ops.providers import candidates, choose, missing_in_row, notes, using
from monograph.ops.varlen_attention import varlen_attention
from monograph.quant.packed_weight import quantize

BOUND = 2**-4  # of the largest value: 16-bit products in another order, rounded more often
ROUNDS = 5
TOKENS = {"cuda": 1024, "cpu": 96}
HEADS, KEY_HEADS, SIZE, CHANNELS, EXPERTS, TOP, RANK = 4, 2, 64, 128, 8, 2, 12

Call = Callable[[list[torch.Tensor], torch.device], torch.Tensor]


def _leaf(shape: tuple[int, ...], salt: int, exponents: tuple[int, int] = (-3, 0)) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return floats(count, salt=salt, exponents=exponents).to(torch.bfloat16).reshape(shape)


def _cu(tokens: int, where: torch.device) -> torch.Tensor:
    """The last tokens are padding; one document is empty."""
    ends = (0, tokens // 3, tokens // 3, tokens - 7, tokens - 7)
    return torch.tensor(ends, dtype=torch.int32, device=where)


def _of_attention(tokens: int) -> tuple[list[torch.Tensor], Call]:
    leaves = [_leaf((tokens, h, SIZE), 200 + i) for i, h in enumerate((HEADS, KEY_HEADS, KEY_HEADS))]
    return leaves, lambda own, where: varlen_attention(own[0], own[1], own[2], _cu(tokens, where))


def _of_rule(tokens: int) -> tuple[list[torch.Tensor], Call]:
    leaves = [_leaf((tokens, h, SIZE), 210 + i) for i, h in enumerate((KEY_HEADS, KEY_HEADS, HEADS))]
    leaves += [-_leaf((tokens, HEADS), 213).abs(), _leaf((tokens, HEADS), 214).abs()]

    def call(own: list[torch.Tensor], where: torch.device) -> torch.Tensor:
        q, k, v, g, beta = own
        return gated_delta_rule(q, k, v, g, beta, _cu(tokens, where))[0]

    return leaves, call


def _of_convolution(tokens: int) -> tuple[list[torch.Tensor], Call]:
    leaves = [_leaf((tokens, CHANNELS), 220), _leaf((CHANNELS, 4), 221), _leaf((CHANNELS,), 222)]
    return leaves, lambda own, where: causal_conv1d(own[0], own[1], own[2], _cu(tokens, where))[0]


def _of_experts(tokens: int) -> tuple[list[torch.Tensor], Call]:
    """Packed in nf4, with LoRA of rank 12, an expert without tokens and slots that are skipped."""
    leaves = [_leaf((tokens, CHANNELS), 230)]
    shapes = ((2 * SIZE, CHANNELS), (CHANNELS, SIZE))
    for i, (rows, cols) in enumerate(shapes):
        leaves += [
            _leaf((RANK * EXPERTS, cols), 231 + i).float(),
            _leaf((rows, RANK * EXPERTS), 233 + i).float(),
        ]
    packed = [quantize(_leaf((EXPERTS, *shape), 235 + i), "nf4") for i, shape in enumerate(shapes)]
    ids = (words(tokens * TOP, salt=237) % EXPERTS - 1).reshape(tokens, TOP)

    def call(own: list[torch.Tensor], where: torch.device) -> torch.Tensor:
        first, second = ((p.values, list(p.scales), p.layout) for p in (one.to(where) for one in packed))
        weights = torch.full((tokens, TOP), 0.5, device=where)
        low = {f"lora{i}": (own[2 * i - 1], own[2 * i], 1.0) for i in (1, 2)}
        return experts(own[0], ids.to(where), weights, first, second, **low)  # type: ignore[arg-type]

    return leaves, call


OPERATORS: dict[str, Callable[[int], tuple[list[torch.Tensor], Call]]] = {
    "varlen_attention": _of_attention,
    "gated_delta_rule": _of_rule,
    "causal_conv1d": _of_convolution,
    "experts": _of_experts,
}


def _results(leaves: list[torch.Tensor], call: Call, where: torch.device) -> list[torch.Tensor]:
    """The output and the gradients of half the sum of its squares."""
    own = [t.detach().to(where).requires_grad_() for t in leaves]
    out = call(own, where)
    grads = torch.autograd.grad(0.5 * out.float().square().sum(), own)
    return [t.detach() for t in (out, *grads)]


def _compared(device: Device, operator: str) -> Figures:
    leaves, call = OPERATORS[operator](TOKENS[device.name])
    wanted = [t.double() for t in _results(leaves, call, torch.device("cpu"))]
    kind = device.where.type
    figures: Figures = {
        "chosen": choose(operator, kind).provider or "nobody",
        "missing": missing_in_row(operator, kind),
        "notes": [note for note in notes(device.where) if note.startswith(f"{operator} by ")],
    }
    for provider in candidates(operator, kind):
        with using({operator: provider}):
            try:
                found = [t.cpu().double() for t in _results(leaves, call, device.where)]
            except ValueError as refused:
                figures[provider] = {"refused": str(refused)[:300]}
                continue
            errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True)]
            finite = all(bool(t.isfinite().all()) for t in found)
            row: dict[str, Any] = {"errors": [round(e, 6) for e in errors] if finite else "not finite"}
            figures[provider] = row
            within = finite and max(errors) <= BOUND
            require(within, f"{operator} by {provider}: off the CPU's by {row['errors']}", figures)
            times = [
                device.milliseconds(lambda: _results(leaves, call, device.where), 1) for _ in range(ROUNDS)
            ]
            row["ms_quartiles"] = [round(q, 4) for q in statistics.quantiles(times, n=4)]
    return figures


def _case(operator: str) -> Case:
    return Case(f"{operator} by everybody who can", lambda device: _compared(device, operator))


CASES = tuple(_case(operator) for operator in OPERATORS)
