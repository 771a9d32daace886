"""monograph::ep_experts on 1 to 4 ranks: the bits of `experts`, bytes counted from the routes, one graph."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from monograph.distributed import World
from monograph.distributed.expert_adapter import FactorCut
from monograph.distributed.expert_exchange import ExpertExchange
from monograph.distributed.expert_group import ExpertGroup, Sent
from monograph.distributed.expert_routes import ExpertRoutes, owned
from monograph.ops.ep_experts import register_group
from monograph.ops.layout import make_layout, read_layout
from monograph.ops.slice_experts import slice_experts
from support.expert_layers import RANK, Case, E, H, run
from support.run_ranks import message, run_ranks, smaller_worlds

ops = torch.ops.monograph
FAMILIES = [("qwen3_moe", "nf4"), ("gpt_oss", "mxfp4")]
K = 4  # the sum of two rows has no order
LENGTHS = (23, 5, 0, 17, 31)  # of micro-batches: one is empty, and on 3 ranks one rank has fewer


def group_of(world):
    group = ExpertGroup(world.rank, world.size, world.group)
    return group, register_group(ExpertExchange(group))


def arguments(case, leaves, rank=0, ranks=1):
    """Of `experts` behind weights: the stacks and biases of one owner, all factors."""
    own = owned(rank, ranks, E)
    found = []
    for place, weight in enumerate((case.first, case.second)):
        values, scales, part = slice_experts(*weight[:2], read_layout("test", weight[2]), own.start, len(own))
        numbers = (part.format, part.block, part.shape, part.origin, part.grid_rows)
        bias = leaves.get(f"bias{place + 1}")
        bias = None if bias is None else bias[own.start : own.stop].contiguous()
        found += [values.clone(), [s.clone() for s in scales], make_layout(*numbers), bias]
    options = {"interleaved": False, "alpha": 1.0, "limit": 1.0, "transposed": False} | case.options
    names = ("interleaved", "alpha", "limit", "transposed")
    found += [leaves[name] for name in ("a1", "b1", "a2", "b2")]
    return [*found, 0.5, 1.5, int(options["activation"]), *(options[name] for name in names)]


def batch(case, tokens, seed, how):
    """(x, ids, weights, dy). how: "random", "one": everybody wants the experts 0 and 1."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, E, generator=g).topk(K).indices
    if how == "one":
        ids[:] = torch.arange(K)
    elif tokens:
        ids[0, 0], ids[-1, 1] = -1, 2**40  # skipped
    x, dy = (torch.randn(tokens, H, generator=g).to(case.leaves["x"].dtype) for _ in range(2))
    return x, ids, torch.rand(tokens, K, generator=g), dy


def gradients(function, case, x, weights, dy):
    """y, dx, dweights and those of the factors."""
    leaves = {"x": x, "weights": weights} | {name: case.leaves[name] for name in ("a1", "b1", "a2", "b2")}
    return run(lambda own: function(own), leaves, dy)


def without_ranks(case, x, ids, weights, dy):
    biases = {name: t for name, t in case.leaves.items() if name.startswith("bias")}
    return gradients(
        lambda own: ops.experts(own["x"], ids, own["weights"], *arguments(case, own | biases), True)[0],
        case,
        x,
        weights,
        dy,
    )


def over_ranks(case, group, number, x, ids, weights, dy):
    biases = {name: t for name, t in case.leaves.items() if name.startswith("bias")}
    return gradients(
        lambda own: ops.ep_experts(
            own["x"], ids, own["weights"], *arguments(case, own | biases, group.rank, group.size), E, number
        ),
        case,
        x,
        weights,
        dy,
    )


def with_cut_factors(case, own, group, number, begin, how):
    """Gradients of this rank's shares: row s is that of the micro-batch of rank s, and none of it is sent."""
    place = begin + own.rank
    x, ids, weights, dy = batch(case, LENGTHS[place] if place < len(LENGTHS) else 0, place, how)
    names = ("a1", "b1", "a2", "b2")
    cuts = [FactorCut(n % 2 == 0, E, group) for n in range(4)]
    biases = {name: t for name, t in case.leaves.items() if name.startswith("bias")}
    shares = {name: cut.share(case.leaves[name]) for name, cut in zip(names, cuts, strict=True)}
    leaves = {name: t.expand(own.size, -1, -1) for name, t in shares.items()}
    group.sent = Sent()
    got = run(
        lambda low: ops.ep_experts(
            low["x"], ids, low["weights"], *arguments(case, low | biases, own.rank, own.size), E, number
        ),
        {"x": x, "weights": weights} | leaves,
        dy,
    )
    assert group.sent.factors == 0
    for source in range(own.size):
        place = begin + source
        given = batch(case, LENGTHS[place] if place < len(LENGTHS) else 0, place, how)
        want = without_ranks(case, *given)
        for name, cut in zip(names, cuts, strict=True):
            assert torch.equal(got[name][source], cut.share(want[name])), (own.size, source, name)
        if source == own.rank:
            assert all(torch.equal(got[name], want[name]) for name in ("y", "x", "weights"))


def bytes_by_routes(ids, rank, ranks, item, factors):
    """What forward and backward send for a micro-batch of this rank, by plain counting."""
    found = Sent()
    for other in set(range(ranks)) - {rank}:
        own = set(owned(other, ranks, E))
        slots = [[e for e in row if e in own] for row in ids.tolist()]
        tokens, count = sum(map(bool, slots)), sum(map(len, slots))
        found.rows_bytes += 3 * tokens * H * item + 2 * count * H * item  # x; x, dy; d and dx come back
        found.beside += 2 * 2 * 4 * count + 2 * 4 * count  # rows and ids twice; weights, their gradient
        found.factors += factors * len(own) // E if count else 0
    return found


def layers(world):
    """All cases on groups of 1, 2, 3 and 4 of the four ranks. Returns what is compared on rank 0."""
    groups = {w.size: (w, *group_of(w)) for w in smaller_worlds(world, [1, 2, 3, 4])}
    counted = []
    for family, format in FAMILIES:
        for dtype in (torch.float32, torch.bfloat16):
            case = Case(family, format, dtype)
            for how in ("random", "one"):
                for size, (own, group, number) in groups.items():
                    for begin in range(0, len(LENGTHS), size):
                        place = begin + own.rank
                        given = batch(case, LENGTHS[place] if place < len(LENGTHS) else 0, place, how)
                        want = without_ranks(case, *given)
                        group.sent, group.most_slots = Sent(), 0
                        got = over_ranks(case, group, number, *given)
                        for name, tensor in want.items():
                            assert torch.equal(got[name], tensor), (family, dtype, how, size, place, name)
                        counted.append(check_bytes(case, own, group, given))
                        if dtype == torch.float32:
                            with_cut_factors(case, own, group, number, begin, how)
                        most = max(LENGTHS) * min(K, -(-E // size))
                        assert group.most_slots <= most, (group.most_slots, most)
    return sum(counted)


def check_bytes(case, own, group, given):
    """The bytes that all ranks have sent for this rank's micro-batch and the others': their sum agrees."""
    item = given[0].element_size()
    factors = sum(case.leaves[name].nbytes for name in ("a1", "b1", "a2", "b2"))
    mine = bytes_by_routes(given[1], own.rank, own.size, item, factors)
    pairs = own.gathered(
        [
            (mine.rows_bytes, mine.factors, mine.beside),
            (group.sent.rows_bytes, group.sent.factors, group.sent.beside),
        ]
    )
    tables = 2 * own.size * (own.size - 1) * 3 * 8  # counts of rows: three numbers to each other rank
    for place in range(3):
        routes, sent = (sum(pair[which][place] for pair in pairs) for which in (0, 1))
        assert sent == routes + (tables if place == 2 and own.size > 1 else 0), (place, sent, routes)
    return group.sent.all_bytes


def test_every_number_of_ranks_gives_the_bits_of_experts_without_them():
    sent = run_ranks(4, "distributed/test_ep_layer:layers")
    assert all(count > 0 for count in sent)


@pytest.mark.parametrize(("family", "format"), FAMILIES)
def test_a_plain_sum_of_partial_outputs_has_other_bits(family, format):
    """The control of the test above: in float32 another order of sums shows at once."""
    case = Case(family, format, torch.float32)
    x, ids, weights, dy = batch(case, 31, 4, "random")
    want = without_ranks(case, x, ids, weights, dy)
    for ranks in (2, 3, 4):
        parts = []
        for rank in range(ranks):
            own = owned(rank, ranks, E)
            here = torch.where((ids >= own.start) & (ids < own.stop), ids, -1)
            parts.append(without_ranks(case, x, here, weights, dy))
        for name in ("y", "x"):
            total = sum(part[name] for part in parts)
            assert not torch.equal(total, want[name]), (ranks, name)
            assert torch.allclose(total, want[name], rtol=1e-4, atol=1e-4 * float(want[name].abs().max()))


def test_routes_serve_every_slot_once():
    """Small domains whole: all ids of two tokens with two slots."""
    for ranks, count in ((1, 1), (2, 3), (3, 3), (3, 5), (4, 5)):
        every = torch.cartesian_prod(*[torch.arange(-1, count + 1)] * 4).reshape(-1, 2, 2)
        for ids in every[:: max(len(every) // 70, 1)]:
            routes = ExpertRoutes.of(ids, ranks, count)
            behind = [(rank, slot) for rank, part in enumerate(routes.parts) for slot in part.slots.tolist()]
            for slot, expert in enumerate(ids.reshape(-1).tolist()):
                place = int(routes.places.reshape(-1)[slot])
                if not 0 <= expert < count:
                    assert place == -1
                    continue
                rank, found = behind[place]
                part = routes.parts[rank]
                at = part.slots.tolist().index(found)
                assert (found, expert) == (slot, owned(rank, ranks, count).start + int(part.ids[at]))
                assert int(part.tokens[part.rows[at]]) == slot // 2
            for part in routes.parts:
                assert len(set(part.tokens.tolist())) == len(part.tokens)


def compiled(world):
    """One graph over 20 routes, forward and backward; other calls on another rank are named."""
    group, number = group_of(world)
    case = Case("qwen3_moe", "nf4", torch.bfloat16)
    counter = CompileCounterWithBackend("aot_eager")
    fixed = arguments(case, case.leaves, world.rank, world.size)

    def loss(x, ids, weights, a1, b1, a2, b2, dy):
        low = [*fixed[:8], a1, b1, a2, b2, *fixed[12:]]
        return (ops.ep_experts(x, ids, weights, *low, E, number).float() * dy.float()).sum()

    traced = torch.compile(loss, fullgraph=True, backend=counter)
    for seed in range(20):
        x, ids, weights, dy = batch(case, 41 + (seed * 5 + world.rank) % 11, seed, "random")
        leaves = [x, weights, *(case.leaves[name] for name in ("a1", "b1", "a2", "b2"))]
        found = []
        for function in (traced, loss):
            x, weights, *low = (t.clone().requires_grad_() for t in leaves)
            for tensor in (x, ids, weights, dy):
                torch._dynamo.mark_dynamic(tensor, 0)
            function(x, ids, weights, *low, dy).backward()
            found.append([t.grad for t in (x, weights, *low)])
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)
    assert counter.frame_count == 1, counter.frame_count

    way = "backward" if world.rank else "forward"
    return message(lambda: group.counts({"call": way}, [(0, 0)] * world.size))


@pytest.mark.slow
def test_one_graph_whatever_the_routes_are():
    first, second = run_ranks(2, "distributed/test_ep_layer:compiled")
    assert "call is forward on rank 0 and backward on rank 1; wanted the same calls" in first
    assert "call is backward on rank 1 and forward on rank 0" in second


def test_opcheck_and_what_is_refused():
    _, number = group_of(World())
    case = Case("gpt_oss", "mxfp4", torch.float32)
    x, ids, weights, dy = batch(case, 9, 0, "random")
    given = arguments(case, {name: t.detach() for name, t in case.leaves.items()})
    utils = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    spread = [*given[:8], *(t[None] for t in given[8:12]), *given[12:]]
    for more in (given, spread):
        opcheck(ops.ep_experts.default, (x, ids, weights, *more, E, number), test_utils=utils)
        opcheck(
            ops.ep_experts_backward.default,
            (dy, x, ids, weights, *more, E, number, [True] * 4),
            test_utils=utils,
        )
    trained = [*given]
    trained[3] = given[3].clone().requires_grad_()
    with pytest.raises(RuntimeError, match="ep_experts: bias1 is trained"):
        ops.ep_experts(x, ids, weights, *trained, E, number).sum().backward()
    with pytest.raises((ValueError, RuntimeError), match="group is 4711, wanted one that"):
        ops.ep_experts(x, ids, weights, *given, E, 4711)
    with pytest.raises((ValueError, RuntimeError), match="ep_experts: b2 has shape"):
        ops.ep_experts(x, ids, weights, *given[:11], given[11][:, : RANK * E - 1], *given[12:], E, number)
