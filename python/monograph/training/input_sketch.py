"""InputSketch: the second moment of a layer's inputs, X^T X / tokens, in few numbers and one pass.

    sketch = InputSketch(4096)
    sketch.add(moments(x))                   # x [tokens, 4096], any number of times
    rows, diagonal = sketch.result()         # rows^T rows is near the mean of x x^T, of rank 64 at most

Nystroem's approximation of A = X^T X from A D, for 128 random directions D that are the same in every run
(Tropp, Yurtsever, Udell and Cevher, "Fixed-rank approximation of a positive-semidefinite matrix from
streaming data", 2017). It never exceeds A, and its error in the trace is on average at most 1 + 64 / 63 times
that of the best rank 64.

Products are those of `monograph::linear` in float32, so that the bits do not depend on the number of threads;
the small factorisations at the end run in float64 on one thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch

from monograph.ops.linear import plain_linear

RANK = 64  # of the result
DIRECTIONS = 128  # that inputs are multiplied with
_SEED = 20170617
_TOKENS = 512  # at a time: 29 MB as float32 for 14,336 inputs
# Relative to the largest eigenvalue: below it the Gram matrix of 128 float32 sums is rounding.
_RESOLVED = 2.0**-20


@lru_cache(maxsize=8)
def directions(inputs: int) -> torch.Tensor:
    """[128, inputs], or a unit matrix where that says all."""
    if inputs <= DIRECTIONS:
        return torch.eye(inputs)
    return torch.randn(DIRECTIONS, inputs, generator=torch.Generator().manual_seed(_SEED))


@dataclass
class Moments:
    """Sums over tokens: x (D x)^T, (D x) (D x)^T and the squares of x."""

    tokens: int
    products: torch.Tensor  # float32 [inputs, directions]
    gram: torch.Tensor  # float64 [directions, directions]
    squares: torch.Tensor  # float64 [inputs]


def moments(x: torch.Tensor, tokens: int | None = None) -> Moments:
    """Of x [tokens, inputs]; `tokens` says how many the rows stand for, if they are weighted."""
    inputs = x.shape[1]
    onto = directions(inputs)
    count = onto.shape[0]
    products = torch.zeros(inputs, count)
    gram = torch.zeros(count, count, dtype=torch.float64)
    squares = torch.zeros(inputs, dtype=torch.float64)
    for part in x.split(_TOKENS):
        rows = part.detach().to("cpu", torch.float32).contiguous()
        transposed = rows.t().contiguous()
        along = plain_linear(rows, onto)
        along_transposed = along.t().contiguous()
        products += plain_linear(transposed, along_transposed)
        gram += plain_linear(along_transposed, along_transposed)
        squares += plain_linear(transposed.square(), torch.ones(1, rows.shape[0]))[:, 0]
    return Moments(x.shape[0] if tokens is None else tokens, products, gram, squares)


@contextmanager
def one_thread() -> Iterator[None]:
    """LAPACK's last bits depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class InputSketch:
    """Sums of `moments` over a stream. For n inputs it holds 4 * 128 n bytes and a little."""

    def __init__(self, inputs: int) -> None:
        self.inputs = inputs
        self._sum: Moments | None = None

    @property
    def tokens(self) -> int:
        return 0 if self._sum is None else self._sum.tokens

    def add(self, seen: Moments) -> None:
        if seen.squares.numel() != self.inputs:
            raise ValueError(f"the inputs have {seen.squares.numel()} columns, wanted {self.inputs}")
        if self._sum is None:
            self._sum = Moments(0, *(torch.zeros_like(t) for t in (seen.products, seen.gram, seen.squares)))
        self._sum.tokens += seen.tokens
        self._sum.products += seen.products
        self._sum.gram += seen.gram
        self._sum.squares += seen.squares

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The sketch, float32 [k, inputs] with 1 <= k <= 64, the strongest direction first, and the mean
        squares, float32 [inputs]. Inputs that are not finite raise."""
        if self._sum is None or self._sum.tokens == 0:
            raise ValueError("no inputs were seen, wanted some")
        total = self._sum
        if not bool(torch.isfinite(total.squares).all() and torch.isfinite(total.products).all()):
            raise ValueError("the inputs, or their squares, are not finite in float32; wanted finite ones")
        diagonal = (total.squares / total.tokens).float()
        with one_thread():
            values, vectors = torch.linalg.eigh((total.gram + total.gram.t()) / (2 * total.tokens))
            kept = values > _RESOLVED * values[-1].clamp_min(0)
            if not bool(kept.any()):  # all inputs are zero
                return torch.zeros(1, self.inputs), diagonal
            half = (total.products.double() / total.tokens) @ (vectors[:, kept] / values[kept].sqrt())
            _, turn = torch.linalg.eigh(half.t() @ half)
            rows = (half @ turn[:, -RANK:].flip(1)).t().float()
        return rows.contiguous(), diagonal
