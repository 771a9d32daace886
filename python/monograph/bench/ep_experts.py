"""One owner's part of a layer of experts that is spread over n ranks, in one process: n = 1, 2, 4, 8.

A rank has a micro-batch of its own and an n-th of the experts. Of each of the n micro-batches it computes the
slots of its experts, one call for each, and sums its own tokens' slots. Nothing is sent: what the network
takes is beside it (`sent` in bytes, by the routes). n = 1 is today's operator, and the unit of `relative`.
`peak_mib` is how far resident memory rises while a layer of 2,048 tokens runs, in a process of its own;
owners serve one micro-batch after the other, so that one is enough there.
"""

from __future__ import annotations

import argparse

import torch

from monograph.bench.experts import ALPHA, pack_layer
from monograph.bench.experts_case import WIDTHS, Width, batch, factors
from monograph.bench.peak_memory import peak_bytes
from monograph.bench.report import Report
from monograph.bench.rounds import Work, paired_rounds
from monograph.distributed.expert_plan import Experts
from monograph.distributed.expert_routes import ExpertRoutes, owned
from monograph.quant.packed_weight import PackedWeight

RANKS = (1, 2, 4, 8)
LORA_RANK = 16
_MEMORY_TOKENS = 2048
_SETUP = """
from monograph.bench.ep_experts import pack_layer, step
from monograph.bench.experts_case import WIDTHS
width = WIDTHS["{name}"]
work = step(width, pack_layer(width, "mxfp4"), {tokens}, {ranks}, 1)
import ctypes
ctypes.CDLL("libc.so.6").malloc_trim(0)  # what packing has left would hide what the work takes
"""
_NEED = [True, True, False, False, True, True]
ops = torch.ops.monograph


def _arguments(
    width: Width, weights: tuple[PackedWeight, PackedWeight], rank: int, ranks: int
) -> list[object]:
    """Of `experts` behind weights: those of the first of `ranks` owners."""
    own = owned(0, ranks, width.experts)
    parts = [weight.slice_experts(own.start, len(own)) for weight in weights]
    shapes = [(len(own), 2 * width.inner), (len(own), width.hidden)]
    found: list[object] = []
    for part, shape in zip(parts, shapes, strict=True):
        found += [part.values, list(part.scales), part.layout, torch.zeros(shape) if width.bias else None]
    low = [t.detach() for t in factors(width, rank)]
    for place, t in enumerate(low):
        if place % 2 == 0:
            low[place] = t.reshape(width.experts, rank, -1)[: len(own)].flatten(0, 1)
        else:
            low[place] = t.reshape(t.shape[0], rank, -1)[..., : len(own)].flatten(1)
    numbers = (ALPHA, ALPHA, int(width.activation), width.interleaved, 1.702, 7.0, False)
    return [*found, *low, *numbers]


def step(
    width: Width,
    weights: tuple[PackedWeight, PackedWeight],
    tokens: int,
    ranks: int,
    sources: int | None = None,
) -> Work:
    """sources: micro-batches that the owner serves; None: as many as ranks."""
    rank = LORA_RANK
    x, dy, ids, routed = batch(width, tokens)
    given = _arguments(width, weights, rank, ranks)
    if ranks == 1:

        def today() -> object:
            y, pre = ops.experts(x, ids, routed, *given, True)
            return y, ops.experts_backward(dy, pre, x, ids, routed, *given, _NEED)

        return today

    def part() -> object:
        routes = ExpertRoutes.of(ids, ranks, width.experts)
        own, found = routes.parts[0], None
        slots = routed.reshape(-1)[own.slots]
        rows = [x.index_select(0, one.tokens) for one in routes.parts]
        rows_dy = [dy.index_select(0, one.tokens) for one in routes.parts]
        for _ in range(sources or ranks):  # every rank's micro-batch is as this one
            d = ops.experts_slots(rows[0], own.rows, own.ids, *given)
            found = ops.experts_slots_backward(rows_dy[0], rows[0], own.rows, own.ids, slots, *given, _NEED)
        assert found is not None
        home = d.new_zeros(int(routes.places.max()) + 1, width.hidden)
        y = ops.combine_slots(home, routes.places, routed)
        return y, ops.combine_slots(home, routes.places, None), found

    return part


def _peak_mib(name: str, ranks: int, threads: int) -> int:
    setup = _SETUP.format(name=name, tokens=_MEMORY_TOKENS, ranks=ranks)
    return peak_bytes(setup, "work()", threads) // 2**20


def run(arguments: argparse.Namespace, report: Report) -> None:
    lengths = arguments.tokens or [256]
    for threads in arguments.threads:
        for name, width in WIDTHS.items():
            if arguments.case and name not in arguments.case:
                continue
            weights = pack_layer(width, "mxfp4")
            torch.set_num_threads(threads)
            for tokens in lengths:
                works = {f"ep{n}": step(width, weights, tokens, n) for n in RANKS}
                result = paired_rounds(works, "ep1", 3 if arguments.quick else 5, least_ms=20.0)
                experts = Experts(1, width.experts, width.top, width.hidden, 2, 1, 1)
                sent = {f"ep{n}": int(tokens * experts.sent_for_a_token(n)) for n in RANKS}
                case = {"width": name, "tokens": tokens, "format": "mxfp4", "rank": LORA_RANK, "sent": sent}
                case["peak_mib"] = {f"ep{n}": _peak_mib(name, n, threads) for n in RANKS}
                report.case(case | {"threads": threads}, result, "ep1")
    report.summary({})
