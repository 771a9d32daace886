"""monograph::seeded_dropout: dropout whose mask is a pure function of a seed and can be computed again.

A recomputed block (activation checkpointing) inside a graph of the whole step may hold no random operation;
this is none: seed and stream say which mask. The gradient is the same operator on dy.

On the CPU and on CUDA the mask is made of the words of Philox4x32-10 (core/monograph/kernels/seeded_dropout).
On other devices the seed stays where it is, for a read would make the host wait, and the mask is a hash of
seed, stream and the place of the element:

    key  = seed * 0x9E3779B97F4A7C15 + stream * 0xD1B54A32D192ED03  mod 2^64, low and high its halves
    h(i) = mix(mix(i ^ low) ^ high), i below 2^31, in 32 bits
    mix(x): x ^= x >> 16; x *= 0x7FEB352D; x ^= x >> 15; x *= 0x846CA68B; x ^= x >> 16
    element i is kept if h(i) >> 8 < (1 - probability) * 2^24, rounded to nearest even
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from monograph.ops import library  # noqa: F401  (the schemas are registered there)
from monograph.ops.argument_checks import check_float, check_tensors, dtype_name, require
from monograph.ops.autograd import register_autograd

_SEED_FACTOR, _STREAM_FACTOR = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
_LOW = 0xFFFFFFFF
PANEL = 1 << 20  # elements of a mask that are hashed at a time: 24 MiB of intermediates


def seeded_dropout(x: torch.Tensor, seed: torch.Tensor, stream: int, probability: float) -> torch.Tensor:
    """x with each element zeroed with `probability`, the others scaled by 1 / (1 - probability).

    seed: int64 []; stream: tells masks of one seed apart, one for each place in a model. Probability 1 leaves
    x * 0, as nn.Dropout.
    """
    if probability == 1:
        return x * 0
    if x.dtype == torch.float64 and x.device.type == "cpu":  # the kernels have no such numbers
        mask = torch.ops.monograph.seeded_dropout(
            torch.ones_like(x, dtype=torch.float32), seed, stream, probability
        )
        return x * (mask != 0) / (1 - probability)
    return torch.ops.monograph.seeded_dropout(x, seed, stream, probability)


def _check_devices(op: str, x: torch.Tensor, seed: torch.Tensor) -> None:
    """The seed is read on the host: it may lie there, or beside x. Fakes run for any mixture with meta."""
    check_tensors(op, x=x)
    check_tensors(op, seed=seed)
    found = f"seed is on {seed.device}, wanted cpu or {x.device} as x"
    require(seed.device.type == "cpu" or seed.device == x.device, op, found)


def seeded_dropout_part(
    x: torch.Tensor, seed: torch.Tensor, stream: int, probability: float, first: int
) -> torch.Tensor:
    """`seeded_dropout` of a part of a tensor: x holds its elements from place `first` on."""
    return torch.ops.monograph.seeded_dropout_part(x, seed, stream, probability, first)


@torch.library.impl("monograph::seeded_dropout", "CompositeExplicitAutograd")
def _seeded_dropout(x: torch.Tensor, seed: torch.Tensor, stream: int, probability: float) -> torch.Tensor:
    return _dropped("seeded_dropout", x, seed, stream, probability, 0)


@torch.library.impl("monograph::seeded_dropout_part", "CompositeExplicitAutograd")
def _seeded_dropout_part(
    x: torch.Tensor, seed: torch.Tensor, stream: int, probability: float, first: int
) -> torch.Tensor:
    return _dropped("seeded_dropout_part", x, seed, stream, probability, first)


def _dropped(
    op: str, x: torch.Tensor, seed: torch.Tensor, stream: int, probability: float, first: int
) -> torch.Tensor:
    _check_devices(op, x, seed)
    check_float(op, "x", x)
    found = f"seed is {dtype_name(seed.dtype)} {list(seed.shape)}, wanted int64 []"
    require(seed.dtype == torch.int64 and seed.dim() == 0, op, found)
    require(0 <= probability < 1, op, f"probability is {probability}, wanted 0 to below 1")
    require(first >= 0, op, f"first is {first}, wanted 0 or more")
    return hashed_dropout(x, seed, stream, probability, first=first)


def _signed(number: int) -> int:
    """What int64 has for a number modulo 2^64."""
    return (number + 2**63) % 2**64 - 2**63


def _mix(x: torch.Tensor) -> torch.Tensor:
    """32 bits to 32 bits, each in an int64."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW
    return x ^ (x >> 16)


def kept(places: torch.Tensor, seed: torch.Tensor, stream: int, probability: float) -> torch.Tensor:
    """Which of these places (int64) the mask keeps."""
    key = seed * _signed(_SEED_FACTOR) + _signed(stream * _STREAM_FACTOR)
    found = _mix(_mix(places ^ (key & _LOW)) ^ ((key >> 32) & _LOW))
    return (found >> 8) < round((1 - probability) * 2**24)


def hashed_dropout(
    x: torch.Tensor,
    seed: torch.Tensor,
    stream: int,
    probability: float,
    panel: int = PANEL,
    first: int = 0,
) -> torch.Tensor:
    """On any device, `panel` elements at a time; a compiler that fuses takes all at once."""
    count = x.numel()
    found = f"x has elements up to place {first + count}, wanted fewer than 2^31"
    require(first + count < 2**31, "seeded_dropout", found)
    seed, flat = seed.to(x.device), x.reshape(-1)
    out = torch.empty_like(flat) if count > panel else None
    for begin in range(0, count, panel):
        part = flat[begin : begin + panel]
        places = torch.arange(first + begin, first + begin + part.numel(), device=x.device)
        dropped = (part * kept(places, seed, stream, probability)) / (1 - probability)
        if out is None:
            return dropped.reshape(x.shape)
        out[begin : begin + panel] = dropped
    return torch.empty_like(flat).reshape(x.shape) if out is None else out.reshape(x.shape)


@torch.library.register_fake("monograph::seeded_dropout")
def _(x, seed, stream, probability):  # type: ignore[no-untyped-def]
    _check_devices("seeded_dropout", x, seed)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("monograph::seeded_dropout_part")
def _(x, seed, stream, probability, first):  # type: ignore[no-untyped-def]
    _check_devices("seeded_dropout_part", x, seed)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, seed, ctx.stream, ctx.probability = inputs
    ctx.save_for_backward(seed)


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    (seed,) = ctx.saved_tensors
    return seeded_dropout(dy, seed, ctx.stream, ctx.probability), None, None, None


register_autograd("seeded_dropout", _backward, _setup_context)


def _part_setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, seed, *ctx.rest = inputs
    ctx.save_for_backward(seed)


def _part_backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    (seed,) = ctx.saved_tensors
    return seeded_dropout_part(dy, seed, *ctx.rest), None, None, None, None


register_autograd("seeded_dropout_part", _part_backward, _part_setup_context)


class SeededDropout(nn.Dropout):
    """An nn.Dropout that draws from `seed`, a tensor shared by all of a model's, and its own stream."""

    def __init__(self, probability: float, seed: torch.Tensor, stream: int) -> None:
        super().__init__(probability)
        self.seed, self.stream = seed, stream

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return input
        return seeded_dropout(input.contiguous(), self.seed, self.stream, self.p)


def seed_dropouts(model: nn.Module) -> torch.Tensor:
    """Replaces every nn.Dropout of the model, in place; gives their seed, to be filled before a forward."""
    where = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    seed = torch.zeros((), dtype=torch.int64, device=where)
    stream = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, SeededDropout):
                child.seed = seed = child.seed if child.seed.device == where else seed
            elif type(child) is nn.Dropout and child.p > 0:
                replaced = SeededDropout(child.p, seed, stream)
                setattr(parent, name, replaced.train(child.training))
            stream += isinstance(child, nn.Dropout)
    return seed
