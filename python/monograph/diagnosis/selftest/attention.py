"""Attention over documents against the CPU's."""

from __future__ import annotations

import torch

from monograph.diagnosis.selftest.bit_patterns import floats
from monograph.diagnosis.selftest.case import Case, Figures, require
from monograph.diagnosis.selftest.device import Device
from monograph.ops.varlen_attention import varlen_attention

TOKENS, HEADS, KEY_HEADS, SIZE = 160, 4, 2, 64
BOUNDARIES = (0, 60, 61, 128, 150)  # the last ten tokens are padding


def _on(where: torch.device, window: int) -> dict[str, torch.Tensor]:
    """The output and the gradients of a sum of its squares, in float64 on the host."""
    q, k, v = (
        floats(TOKENS * heads * SIZE, salt=80 + i, exponents=(-3, 1))
        .to(torch.bfloat16)
        .reshape(TOKENS, heads, SIZE)
        .to(where)
        .requires_grad_()
        for i, heads in enumerate((HEADS, KEY_HEADS, KEY_HEADS))
    )
    cu = torch.tensor(BOUNDARIES, dtype=torch.int32, device=where)
    out = varlen_attention(q, k, v, cu, window=window)
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    names = ("out", "dq", "dk", "dv")
    return {name: t.detach().cpu().double() for name, t in zip(names, (out, *grads), strict=True)}


def documents(device: Device) -> Figures:
    """Forward and gradients, with and without a window; a 16-bit softmax and another order of sums apart."""
    figures: Figures = {}
    for window in (0, 16):
        host, there = _on(torch.device("cpu"), window), _on(device.where, window)
        for name, wanted in host.items():
            error = float((there[name] - wanted).abs().max() / wanted.abs().max())
            key = f"{name}, window {window}"
            figures[key] = round(error, 6)
            require(error <= 2**-6, f"{key}: {error:.4f} of the largest value off the CPU's", figures)
        require(
            float(there["out"][BOUNDARIES[-1] :].abs().max()) == 0,
            "padding behind the last document is not 0",
        )
    return figures


CASES = (Case("attention over documents", documents),)
