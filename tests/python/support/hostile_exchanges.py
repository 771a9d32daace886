"""Hostile calls of `ep_experts` and its gradient on ranks: spoiled on all of them, or on one alone.

A call is accepted or refused with words of its own, on every rank alike, and never leaves a rank waiting.
"""

from __future__ import annotations

from random import Random
from typing import Any

import torch

import monograph as mg
from monograph.distributed.expert_exchange import ExpertExchange
from monograph.distributed.expert_group import ExpertGroup
from monograph.distributed.expert_routes import owned
from monograph.ops.ep_experts import register_group
from monograph.ops.layout import make_layout, read_layout
from monograph.ops.slice_experts import slice_experts
from support.hostile_arguments import describe, spoil, well_said
from support.hostile_file_calls import DTYPES, floats

ops = torch.ops.monograph
_NONE = 4711  # a group that nobody has made


def valid(r: Random, rank: int, ranks: int, group: int) -> list[Any]:
    """Of `ep_experts`; the same layer on every rank, tokens of its own."""
    count, inner, hidden, k = ranks + r.choice((0, 1, 3)), 32, 64, r.choice((1, 2))
    activation, dtype, low_rank = r.randrange(4), r.choice(DTYPES[:2]), r.choice((1, 3))
    own = owned(rank, ranks, count)
    layer: list[Any] = []
    for rows, cols in ((2 * inner, hidden), (hidden, inner)):
        packed = mg.quantize(floats(r, count, rows, cols), r.choice(("nf4", "mxfp4", "nvfp4")))
        whole = read_layout("test", packed.layout)
        layer.append((packed.values, packed.scales, whole, floats(r, count, rows, dtype=dtype)))
    cut, bias = r.random() < 0.5, r.random() < 0.5
    shapes = ((low_rank * count, hidden), (2 * inner, low_rank * count), (low_rank * count, inner))
    low = [floats(r, *shape) for shape in (*shapes, (hidden, low_rank * count))]
    stacks: list[Any] = []
    for values, scales, whole, biases in layer:
        values, scales, part = slice_experts(values, scales, whole, own.start, len(own))
        layout = make_layout(part.format, part.block, part.shape, part.origin, part.grid_rows)
        kept = biases[own.start : own.stop].contiguous() if bias else None
        stacks += [values.clone(), [s.clone() for s in scales], layout, kept]
    if cut:
        low = [_share(t, place, own, count).expand(ranks, -1, -1) for place, t in enumerate(low)]
    own_tokens = Random(f"{r.random()} {rank}")
    tokens = own_tokens.choice((0, 1, 7))
    ids = torch.tensor([[own_tokens.randrange(-1, count + 1) for _ in range(k)] for _ in range(tokens)])
    x, routed = floats(own_tokens, tokens, hidden, dtype=dtype), floats(own_tokens, tokens, k)
    numbers = (0.5, 2.0, activation, activation < 4 and r.random() < 0.5, 1.702, 7.0, False, count, group)
    return [x, ids.reshape(tokens, k).long(), routed, *stacks, *low, *numbers]


def _share(t: torch.Tensor, place: int, own: range, count: int) -> torch.Tensor:
    if place % 2 == 0:
        return t.reshape(count, -1, t.shape[1])[own.start : own.stop].flatten(0, 1)
    return t.reshape(t.shape[0], -1, count)[..., own.start : own.stop].flatten(1)


def made(seed: int, number: int, rank: int, ranks: int, group: int) -> tuple[str, list[Any]]:
    """The operator and its arguments, spoiled on one rank or on all."""
    r = Random(f"{seed} {number}")
    name = r.choice(("ep_experts", "ep_experts_backward"))
    arguments = valid(r, rank, ranks, group)
    if name.endswith("backward"):
        dy = floats(Random(rank), *arguments[0].shape, dtype=arguments[0].dtype)
        arguments = [dy, *arguments, [r.random() < 0.8 for _ in range(4)]]
    alone = r.randrange(-1, ranks)  # -1: all of them
    if alone in (-1, rank):
        schema = getattr(ops, name).default._schema
        for _ in range(r.choice((1, 1, 2))):
            place = r.randrange(len(arguments))
            if schema.arguments[place].name != "group":
                arguments[place] = spoil(r, str(schema.arguments[place].type), arguments[place])
    return name, arguments


def _reaches(name: str, arguments: list[Any]) -> bool:
    """Whether it comes as far as the operator itself: what torch refuses by the schema it refuses on one rank
    alone, which then is no call."""
    place = [a.name for a in getattr(ops, name).default._schema.arguments].index("group")
    try:
        getattr(ops, name)(*arguments[:place], _NONE, *arguments[place + 1 :])
    except Exception as error:
        return f"group is {_NONE}" in str(error)
    return True


def hostile(world: Any, calls: int, seed: int) -> dict[str, Any]:
    """What became of the calls: counts, and what must not be."""
    group = register_group(ExpertExchange(ExpertGroup(world.rank, world.size, world.group)))
    counts, wrong = {"accepted": 0, "refused": 0, "no call": 0}, []
    for number in range(calls):
        name, arguments = made(seed, number, world.rank, world.size, group)
        if not all(world.gathered(_reaches(name, arguments))):
            counts["no call"] += 1
            continue
        said = ""
        try:
            getattr(ops, name)(*arguments)
        except Exception as error:
            said = str(error)
            made_of = name.replace("ep_experts", "experts_slots")
            if not (well_said(name, error) or well_said(made_of, error)):
                wrong.append(f"{number}: {name}({', '.join(map(describe, arguments))}): {said}")
        counts["refused" if said else "accepted"] += 1
        both = world.gathered(said)
        if len({bool(one) for one in both}) > 1:
            wrong.append(f"{number}: {name}: not on every rank: {both}")
    return counts | {"wrong": wrong}
