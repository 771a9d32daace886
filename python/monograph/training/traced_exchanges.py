"""What traced layers exchange, in order: ranks must have it alike, or one waits for another for ever.

A trace is made on each rank for itself, from its own lengths, and a compiler may leave a call out. The lists
are compared before each step; that a call is the same on all ranks each exchange checks itself
(distributed/expert_group.py).
"""

from __future__ import annotations

import hashlib

from torch import nn
from torch.fx import GraphModule

from monograph.training.regions import TRACES, region_layers
from monograph.upstream.torch_names import schema_of

_NAMES = ("monograph::ep_experts", "monograph::ep_experts_backward")


def exchanges_in(graph: GraphModule | None) -> tuple[str, ...]:
    """The names of the calls of a graph, in order."""
    names = [
        getattr(schema_of(n.target), "name", "") for n in (graph.graph.nodes if graph is not None else ())
    ]
    return tuple(name for name in names if name in _NAMES)


def traced_exchanges(model: nn.Module) -> int:
    """A hash, below 2^63, of the different lists (forward, backward) of a model's traces: a rank that has
    traced a layer for more lengths than another has the same."""
    words = {layer.region_word for layer in region_layers(model).values()}
    found = {
        (exchanges_in(traced.forward), exchanges_in(traced.backward))
        for number, traced in TRACES.by_number.items()
        if words & TRACES.users[number]
    }
    digest = hashlib.sha256(repr(sorted(found)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
