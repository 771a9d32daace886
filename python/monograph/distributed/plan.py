"""What a step takes on a number of ranks: bytes held, bytes moved, collectives, seconds. Nothing is run.

    sizes = read_sizes(model)                                 # on the meta device, with its adapter
    plan = make_plan(sizes, Mesh(ranks=512, shard=8), Step(tokens=4096, micro_batches=512))
    plan.memory["shard"], plan.moved, plan.seconds(Link(50e9))

Layouts and the order of sums are those that training uses (layer_bytes.py, tree.py). The collectives are
compared with graphs on fake process groups, byte by byte: tests/python/distributed/test_scale.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, log2

from monograph.distributed.expert_plan import Experts
from monograph.distributed.layer_bytes import Layout, Piece, aligned
from monograph.distributed.tree import Order, chunk_length, padded

FLOAT = 4  # bytes: the adapter, its moments and its gradient are float32
COUNTS = 3 * 8  # bytes: what ranks tell each other before a step (training/micro_batches.py)
LOSS_TOKENS = 256  # whose logits exist at a time (linear_cross_entropy)
FLOPS_PER_WEIGHT = 6  # of a token: forward, forward again, gradient of the input; the base has no other


@dataclass(frozen=True)
class Unit:
    """Frozen tensors that are gathered together."""

    name: str
    pieces: tuple[Piece, ...]
    gathers: int  # of a micro-batch: forward, and again in backward if it is needed there
    layer: bool  # one of the repeated layers
    experts: tuple[str, ...] = ()  # the pieces that are packed experts

    def without_experts(self) -> Unit:
        kept: list[Piece] = []
        for piece in (p for p in self.pieces if p.name not in self.experts):
            end = kept[-1].offset + kept[-1].nbytes if kept else 0
            kept.append(piece._replace(offset=aligned(end)))
        return replace(self, pieces=tuple(kept), experts=())

    def layout(self, ranks: int) -> Layout:
        return Layout(self.pieces, ranks)


@dataclass(frozen=True)
class Sizes:
    """Of a model with its adapter. numbers are elements; working: floats of a token in one layer at most."""

    units: tuple[Unit, ...]
    whole_bytes: int  # what every rank holds whole: small frozen parameters
    trained: int
    layers: int
    hidden: int
    vocabulary: int
    working: int
    active: int  # weights that a token is multiplied with
    float_bytes: int  # of an activation
    experts: Experts | None = None

    @property
    def base_bytes(self) -> int:
        return self.whole_bytes + sum(unit.layout(1).tensor_bytes for unit in self.units)


@dataclass(frozen=True)
class Mesh:
    """`shard` neighbouring ranks hold one replica together; ranks / shard replicas. experts: neighbouring
    ranks over which the experts are spread."""

    ranks: int
    shard: int
    experts: int = 1

    def __post_init__(self) -> None:
        if self.shard < 1 or self.ranks < 1 or self.ranks % self.shard:
            raise ValueError(f"shard size is {self.shard}, wanted a divisor of {self.ranks}, the ranks")
        if self.experts < 1 or self.ranks % self.experts:
            raise ValueError(
                f"expert_parallel_size is {self.experts}, wanted a divisor of {self.ranks}, the ranks"
            )


@dataclass(frozen=True)
class Step:
    """tokens: of a micro-batch; micro_batches: of the step over all ranks; virtual_shards: 0 for as many.
    whole: the sum over ranks is in the graph, in one piece; else behind it, in chunks."""

    tokens: int
    micro_batches: int
    virtual_shards: int = 0
    whole: bool = False


@dataclass(frozen=True)
class Link:
    """What one rank sends and receives a second at most, and the seconds of one hop of a ring."""

    bytes_a_second: float
    latency: float = 0.0


@dataclass(frozen=True)
class Collective:
    """One kind of collective of a step, as a rank sees it. input, output: bytes of one call."""

    what: str
    operator: str
    ranks: int
    calls: int
    input: int
    output: int

    @property
    def moved(self) -> int:
        """Bytes that a rank sends, or receives if that is more, in all calls; its own share stays."""
        if self.operator == "exchange":  # of what goes to others alone
            return self.calls * self.input
        if self.operator == "all_reduce":
            return self.calls * 2 * self.input * (self.ranks - 1) // self.ranks
        return self.calls * max(self.input, self.output) * (self.ranks - 1) // self.ranks

    def seconds(self, link: Link) -> float:
        """Of a ring, without overlap."""
        hops = self.calls * (self.ranks - 1) * {"all_reduce": 2, "exchange": 4}.get(self.operator, 1)
        return self.moved / link.bytes_a_second + hops * link.latency


@dataclass(frozen=True)
class Plan:
    """memory: bytes of the rank with the most micro-batches. rounds: micro-batches it runs."""

    mesh: Mesh
    memory: Mapping[str, int]
    collectives: tuple[Collective, ...]
    rounds: int
    flops: float  # of a rank in a step, without attention's and the adapter's

    @property
    def held(self) -> int:
        return sum(self.memory.values())

    @property
    def gathers(self) -> tuple[Collective, ...]:
        return tuple(c for c in self.collectives if c.operator == "all_gather" and c.what != "gradient")

    @property
    def moved(self) -> int:
        return sum(c.moved for c in self.collectives)

    @property
    def calls(self) -> int:
        return sum(c.calls for c in self.collectives)

    def seconds(self, link: Link, inside: Link | None = None) -> float:
        """Of all collectives; inside: the link among the ranks that hold one replica."""
        gathers = set(self.gathers)
        return sum(c.seconds(inside or link if c in gathers else link) for c in self.collectives)


def make_plan(sizes: Sizes, mesh: Mesh, step: Step) -> Plan:
    leaves = step.virtual_shards or step.micro_batches
    order = Order.of(step.micro_batches, leaves, 0, mesh.ranks)
    spread = sizes.experts if mesh.experts > 1 else None
    if mesh.experts > 1 and spread is None:
        raise ValueError(f"expert_parallel_size is {mesh.experts}, and the model has no packed experts")
    units = sizes.units if spread is None else tuple(unit.without_experts() for unit in sizes.units)
    rows = [(unit, unit.layout(mesh.shard)) for unit in units]
    collectives: list[Collective] = []
    if mesh.shard > 1:
        collectives += [
            Collective(
                u.name, "all_gather", mesh.shard, order.most * u.gathers, row.bytes_per_rank, row.nbytes
            )
            for u, row in rows
        ]
    # Factors of spread experts lie on their owners, which sum them: over the groups alone.
    cut = 0 if spread is None else spread.trained
    held = 0 if spread is None else spread.held_factors(mesh.experts)
    shared, trained = sizes.trained - cut, sizes.trained - cut + held
    collectives += _sum_of_gradients(shared + 1, order, mesh.ranks, step.whole)
    if held and mesh.ranks > mesh.experts:
        groups = mesh.ranks // mesh.experts
        among = Order.of(step.micro_batches, leaves, 0, groups)
        collectives += _sum_of_gradients(held, among, groups, step.whole)
    if mesh.ranks > 1:
        collectives.append(Collective("targets", "all_reduce", mesh.ranks, 1, COUNTS, COUNTS))
    # The next layer is gathered while the last is not yet freed; embedding and head are alone.
    rooms = [row.nbytes * (2 if unit.layer else 1) for unit, row in rows]
    memory = {
        "shard": sum(row.bytes_per_rank for _, row in rows) + sizes.whole_bytes,
        "gathered": max(rooms) if mesh.shard > 1 else 0,
        "adapter": FLOAT * trained,
        "moments": 2 * FLOAT * trained,
        # Of its experts a rank has those of each rank of the group apart, and then their sum.
        "gradients": _gradient_bytes(shared + 1, order, mesh.ranks, step.whole)
        + FLOAT * held * (mesh.experts * (1 + ceil(log2(max(order.most, 1)))) + 1),
        "layer inputs": sizes.layers * step.tokens * sizes.hidden * sizes.float_bytes,
        "one layer": step.tokens * sizes.working * sizes.float_bytes,
        "logits": min(step.tokens, LOSS_TOKENS) * sizes.vocabulary * FLOAT,
    }
    if spread is not None:
        each = ceil(step.tokens * spread.sent_for_a_token(mesh.experts) / spread.layers)
        collectives.append(
            Collective("experts", "exchange", mesh.experts, order.most * spread.layers, each, each)
        )
        memory |= {
            "experts": spread.held_bytes(mesh.experts),
            "exchange": spread.buffer_bytes(mesh.experts, step.tokens),
        }
    flops = float(FLOPS_PER_WEIGHT) * sizes.active * step.tokens * order.most
    return Plan(mesh, memory, tuple(collectives), order.most, flops)


def _chunks(length: int, ranks: int, whole: bool) -> list[int]:
    """Numbers that are summed over ranks at a time."""
    step = length if whole else chunk_length(ranks)
    return [min(step, length - begin) for begin in range(0, length, step)]


def _sum_of_gradients(length: int, order: Order, ranks: int, whole: bool) -> list[Collective]:
    """Those of `sum_over_ranks`, for the rank that has the most roots."""
    if ranks == 1:
        return []
    length = padded(length, ranks)
    if order.roots == (1, 1):
        return [Collective("gradient", "all_reduce", ranks, 1, FLOAT * length, FLOAT * length)]
    found = []
    for size, calls in Counter(_chunks(length, ranks, whole)).items():
        sent, received = max(order.roots) * FLOAT * size, sum(order.roots) * FLOAT * size // ranks
        found.append(Collective("gradient", "all_to_all", ranks, calls, sent, received))
        found.append(Collective("gradient", "all_gather", ranks, calls, FLOAT * size // ranks, FLOAT * size))
    return found


def _gradient_bytes(length: int, order: Order, ranks: int, whole: bool) -> int:
    """While micro-batches are summed, or while the ranks exchange their roots: whichever is more."""
    length = padded(length, ranks)
    own = FLOAT * length * (2 + ceil(log2(max(order.most, 1))))  # one in the leaves of autograd, one in a row
    if ranks == 1 or order.roots == (1, 1):
        return own
    chunk, roots = FLOAT * max(_chunks(length, ranks, whole)), max(order.roots)
    exchanged = chunk * (roots if roots > 1 else 0) + sum(order.roots) * chunk // ranks
    result = FLOAT * length if whole else 0  # a chunk takes the place of the rank's own
    return max(own, roots * FLOAT * length + exchanged + result)


def sliced_saving(trained: int, ranks: int) -> int:
    """Bytes of a rank that an optimiser on slices would save: the moments of all shares but its own."""
    return 2 * FLOAT * (trained - -(-trained // ranks))


def routed_bytes(layers: int, hidden: int, chosen: int, float_bytes: int) -> int:
    """What expert parallelism sends for a token at most, whatever the number of ranks: each slot alone, all
    experts on other ranks. x out and a row back in forward; x and dy out and dx back in backward."""
    return 5 * layers * chosen * hidden * float_bytes
