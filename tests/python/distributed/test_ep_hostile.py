"""No call of `ep_experts` crashes, hangs or is refused on one rank alone; nor does its gradient's."""

from __future__ import annotations

from random import Random

import pytest
import torch

from monograph.distributed.expert_exchange import ExpertExchange
from monograph.distributed.expert_group import ExpertGroup
from monograph.ops.ep_experts import register_group
from support.hostile_exchanges import hostile, valid
from support.run_ranks import message, run_ranks

ops = torch.ops.monograph


def calls(world, count, seed):
    return hostile(world, count, seed)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_hostile_calls_end_alike_on_every_rank(ranks):
    for found in run_ranks(ranks, "distributed/test_ep_hostile:calls", 240, ranks):
        assert found["wrong"] == []
        assert found["refused"] > 48, found
        assert found["accepted"] > 24, found


def one_wrong(world):
    """What both ranks are told if rank 1 alone calls it in another way."""
    group = register_group(ExpertExchange(ExpertGroup(world.rank, world.size, world.group)))
    names = [a.name for a in ops.ep_experts.default._schema.arguments]
    behind = [a.name for a in ops.ep_experts_backward.default._schema.arguments]
    found = []

    def told(change, *, backward=False):
        arguments = valid(Random(8), world.rank, world.size, group)
        known = dict(zip(names, arguments, strict=True))
        if backward:
            known |= {"dy": torch.ones_like(known["x"]), "need": [True] * 4}
        if world.rank:
            known |= change(known)
        call = ops.ep_experts_backward if backward else ops.ep_experts
        found.append(message(lambda: call(*(known[name] for name in (behind if backward else names)))))

    told(lambda known: {})
    told(lambda known: {"ids": known["ids"].int()})
    told(lambda known: {"count": known["count"] + 1})
    told(lambda known: {"x": known["x"].half()})
    told(lambda known: {"lora_scale1": 0.75})
    told(lambda known: {"a1": None, "b1": None})
    told(lambda known: {"need": [True, False, True, True]}, backward=True)
    told(lambda known: {"need": [True]}, backward=True)
    told(lambda known: {"dy": known["dy"][:, 1:]}, backward=True)
    told(lambda known: {})
    return found


def test_what_one_rank_does_wrong_is_told_on_all():
    first, second = run_ranks(2, "distributed/test_ep_hostile:one_wrong")
    assert first[0] == second[0] == first[-1] == second[-1] == "no error"
    for place, part in (
        (1, "ep_experts: ids has dtype int32, wanted int64"),
        (2, "are here, and the stacks have"),
        (7, "ep_experts_backward: need has 1 entries, wanted 4"),
        (8, "ep_experts_backward: dy has shape"),
    ):
        assert second[place].startswith("ValueError: ")
        assert part in second[place]
        assert "rank 1 has refused its call, and so this one cannot run: " in first[place]
        assert part in first[place]
    for place, part in (
        (3, "x is {} with 64 columns on rank {} and "),
        (4, "lora_scale1 to transposed is "),
        (5, "factors (rank, dtypes) is "),
        (6, "call is backward (to x 1, weights "),
    ):
        assert part.split("{")[0] in first[place], first[place]
        assert part.split("{")[0] in second[place]


def test_a_group_that_nobody_has_made_is_named():
    group = register_group(ExpertExchange(ExpertGroup(0, 1)))
    arguments = valid(Random(3), 0, 1, group)
    ops.ep_experts(*arguments)
    for number in (-1, 2**62, group + 1):
        for call in (
            lambda n=number: ops.ep_experts(*arguments[:-1], n),
            lambda n=number: ops.ep_experts_backward(arguments[0], *arguments[:-1], n, [True] * 4),
        ):
            assert f"group is {number}, wanted one that monograph.expert_parallel has made here" in message(
                call
            )


def test_values_and_layouts_in_memory_that_experts_takes_are_taken():
    """NaN, infinity, tensors in strides and no tokens: the bits of `experts`."""
    group = register_group(ExpertExchange(ExpertGroup(0, 1)))
    for seed in range(12):
        arguments = valid(Random(seed), 0, 1, group)
        x, ids, weights, *rest = arguments
        low = [t if t is None or t.dim() == 2 else t[0].contiguous() for t in rest[8:12]]
        given = [*rest[:8], *low, *rest[12:-2]]
        if len(x):
            x[0, 0], x[-1, 1], weights[0, 0] = float("nan"), float("inf"), float("-inf")
        wide = x.repeat_interleave(2, 1)[:, ::2]
        turned = ids.t().contiguous().t()
        want, _ = ops.experts(x, ids, weights, *given, False)
        got = ops.ep_experts(wide, turned, weights.t().contiguous().t(), *rest)
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
        assert torch.equal(got.isnan(), want.isnan())
