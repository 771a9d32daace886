"""The norm of a gradient whose factors of experts lie on their owners: the bits of the kernel's."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from torch.library import opcheck

from monograph.distributed.expert_adapter import FactorCut
from monograph.distributed.expert_group import ExpertGroup
from monograph.distributed.expert_norm import BLOCK, LANES, SpreadNorm, SquaresInOrder, squares
from monograph.ops.adamw import adamw
from monograph.ops.spread_norm import register_norm
from support.run_ranks import message, run_ranks

SIZES = (1, 15, 16, 17, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 77, 65 * BLOCK + 5)


def by_kernel(gradients):
    """That of one process. The step leaves the gradients as they are."""
    zeros = [[torch.zeros(g.numel()) for g in gradients] for _ in range(3)]
    numbers = (0.9, 0.99, 1e-8, [0.0] * len(gradients), 0.0)
    return adamw(zeros[0], gradients, *zeros[1:], torch.tensor(0.0), torch.tensor(1e-3), *numbers)


def plain(gradients):
    """The order of adamw.h, number by number, in Python's float64."""
    total = 0.0
    for g in gradients:
        values = g.tolist()
        for begin in range(0, len(values), BLOCK):
            lanes = [0.0] * LANES
            for place, value in enumerate(values[begin : begin + BLOCK]):
                lanes[place % LANES] += value * value
            half = LANES // 2
            while half:
                lanes = [lanes[k] + lanes[k + half] for k in range(half)]
                half //= 2
            total += lanes[0]
    return total


def drawn(size, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=g) * 10 ** (8 * torch.rand(size, generator=g) - 6)


def test_the_order_of_the_kernel_in_pieces_of_any_size():
    for seed, size in enumerate(SIZES):
        gradients = [drawn(size, seed), drawn(37, seed + 100)]
        found = SquaresInOrder()
        for gradient in gradients:
            for piece in gradient.split(max(size // 3, 1)):
                found.add(piece)
            found.end()
        if size < 4 * BLOCK:
            assert found.total == plain(gradients)
        rounded = torch.tensor(math.sqrt(found.total), dtype=torch.float64).float()
        assert torch.equal(rounded, by_kernel(gradients))


def test_any_order_is_within_the_distance_that_is_said():
    for seed, size in enumerate(SIZES):
        gradient = drawn(size, seed)
        found, depth = squares([gradient])
        exact = math.fsum(v * v for v in gradient.tolist())  # each square is exact in float64
        assert abs(found - exact) <= depth * 2.0**-53 * exact
        assert depth >= 1024


def norm_of(sizes, **more):
    group = ExpertGroup(0, 1)
    cut = FactorCut(rows=True, count=1, group=group)
    shapes = [torch.Size((size, 1)) for size in sizes]
    return SpreadNorm(sizes, shapes, [cut if n % 2 else None for n in range(len(sizes))], **more)


@pytest.mark.parametrize("wider", [1.0, 1e9])
def test_one_rank_has_the_bits_of_the_kernel(wider):
    sizes = [300, 5 * BLOCK, 7, BLOCK + 3]
    ends = [sum(sizes[:3]), sum(sizes)]
    norm = norm_of(sizes, wider=wider)
    number = register_norm(norm)
    for seed in range(20):
        gradient = drawn(sum(sizes), seed)
        want = by_kernel([gradient[: ends[0]].contiguous(), gradient[ends[0] :].contiguous()])
        assert torch.equal(torch.ops.monograph.spread_norm(gradient, ends, number), want)
    assert norm.in_order == (0 if wider == 1.0 else 20)


def test_opcheck():
    number = register_norm(norm_of([40, 9]))
    utils = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    opcheck(torch.ops.monograph.spread_norm.default, (drawn(49, 0), [40, 49], number), test_utils=utils)


def near_a_tie():
    """Numbers whose norm is 1 + 2^-24 but for its last bits: float32 may round it either way."""
    tie = (1 + 2.0**-24) ** 2
    first = torch.tensor([1.0])
    rest = torch.full((4096,), math.sqrt((tie - 1.0) / 4096))
    return torch.cat([first, rest])


def test_a_norm_that_lies_between_two_numbers_is_summed_in_order():
    gradient = near_a_tie()
    total = plain([gradient])
    low, high = (
        struct.unpack("f", struct.pack("f", math.sqrt(total * (1 + sign * 1e-7))))[0] for sign in (-1, 1)
    )
    assert low != high
    norm = norm_of([1, 4096], wider=1e5)
    assert torch.equal(norm(gradient, [4097]), by_kernel([gradient]))
    assert norm.in_order == 1


def test_what_is_not_finite_or_nothing():
    norm = norm_of([4, 4])
    for bad in (float("nan"), float("inf"), -float("inf")):
        gradient = torch.zeros(8)
        gradient[5] = bad
        assert not norm(gradient, [8]).isfinite()
    assert float(norm(torch.zeros(8), [8])) == 0.0
    assert (
        float(norm(torch.full((8,), 3e38), [8])) == float("inf") == float(by_kernel([torch.full((8,), 3e38)]))
    )
    assert norm.in_order == 0
    with pytest.raises((ValueError, RuntimeError), match="norm is 99999, wanted one that a training step"):
        torch.ops.monograph.spread_norm(torch.zeros(8), [8], 99999)
    with pytest.raises((ValueError, RuntimeError), match="gradient has 2 dimensions, wanted 1"):
        torch.ops.monograph.spread_norm(torch.zeros(8, 1), [8], 0)
    assert "spread_norm" in message(lambda: torch.ops.monograph.spread_norm(torch.zeros(8).int(), [8], 0))


def over_ranks(world, count, wider):
    """Factors of `count` experts cut over the ranks, between tensors that all have."""
    group = ExpertGroup(world.rank, world.size, world.group)
    a, b, shared = (6 * count, 700), (900, 3 * count), 5000
    kinds = [None, FactorCut(True, count, group), FactorCut(False, count, group), None]
    found = []
    for seed in range(5):
        whole = [drawn(size, 10 * seed + n) for n, size in enumerate((shared, 4200 * count, 2700 * count, 9))]
        whole[1], whole[2] = whole[1].view(a), whole[2].view(b)
        shares = [t if kind is None else kind.share(t) for t, kind in zip(whole, kinds, strict=True)]
        sizes = [t.numel() for t in shares]
        norm = SpreadNorm(sizes, [t.shape for t in shares], kinds, wider)
        gradient = torch.cat([t.reshape(-1) for t in shares])
        got = norm(gradient, [sum(sizes[:3]), sum(sizes)])
        want = by_kernel([torch.cat([t.reshape(-1) for t in whole[:3]]), whole[3]])
        assert norm.in_order == (wider > 1)
        found.append((float(got), float(want)))
        for kind, t, share in zip(kinds, whole, shares, strict=True):
            if kind is not None:
                assert kind.whole_shape(share.shape) == t.shape
                back = kind.gathered(share)
                assert (back is None) == bool(world.rank)
                assert back is None or torch.equal(back, t)
    return found


@pytest.mark.slow
def test_ranks_have_the_bits_of_one():
    for ranks in (2, 3):
        for found in run_ranks(ranks, "distributed/test_ep_norm:both", 8):
            assert [got for got, _ in found] == [want for _, want in found]


def both(world, count):
    return over_ranks(world, count, 1.0) + over_ranks(world, count, 1e9)
