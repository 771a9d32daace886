"""Graphs without writes: what a layer changes in place becomes new values, as far as nobody else can see it.

One write that others can see is held: `clamp_` of a frozen tensor, as Gemma 3n does with a small matrix while
it trains. It is the same however often it is done, so that a recomputation may leave it out; the forward
gives the new value, and the operator writes it if it differs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.func import functionalize
from torch.fx import GraphModule, Node

from monograph.training.regions.partition import extracted, owner, without_writes
from monograph.upstream.torch_names import make_fx, schema_of

_CLAMPS = ("aten::clamp_", "aten::clamp_min_", "aten::clamp_max_")


def _writes(graph: GraphModule) -> list[Node]:
    return [n for n in graph.graph.nodes if getattr(schema_of(n.target), "is_mutable", False)]


def _clamped(graph: GraphModule, frozen: range) -> dict[int, None]:
    """The places of frozen inputs that are clamped in place, by nothing else and once."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    written: dict[Node, list[Node]] = {}
    for node in _writes(graph):
        written.setdefault(owner(node.args[0]), []).append(node)  # type: ignore[arg-type]
    found: dict[int, None] = {}
    for place in frozen:
        nodes = written.get(inputs[place], [])
        if nodes and all(
            schema_of(n.target).name in _CLAMPS and n.args[1:] == nodes[0].args[1:] for n in nodes
        ):
            found[place] = None
    return found


def functional(
    graph: GraphModule, primals: list[Any], tangents: list[Any], frozen: range
) -> tuple[GraphModule, dict[int, Node]]:
    """The graph without in-place operations, and what it writes into frozen inputs, by their places.

    primals, tangents: what it was traced with, by the names that torch's partitioner knows them by. Other
    writes into inputs are refused.
    """
    without_writes(graph)
    if not _writes(graph):
        return graph, {}
    clamped = _clamped(graph, frozen)
    given = graph.graph.find_nodes(op="placeholder")
    for node in _writes(graph):
        place = next((n for n, one in enumerate(given) if one is owner(node.args[0])), None)  # type: ignore[arg-type]
        if place is not None and place not in clamped:
            raise ValueError(f"it changes a tensor in place with {node.target}")
    (output,) = graph.graph.find_nodes(op="output")
    plain = extracted(graph, given, output.args[0], effects=_writes(graph))
    rewritten = functionalize(lambda primals, tangents: plain(*primals, *tangents), remove="mutations")
    with torch.no_grad():
        flat = make_fx(rewritten)([t.detach() for t in primals], [t.detach() for t in tangents])
    flat.graph.eliminate_dead_code()
    inputs = [node for node in flat.graph.nodes if node.op == "placeholder"]
    new: dict[int, Node] = {}
    for node in _writes(flat):
        place = next((p for p in clamped if inputs[p] is node.args[0]), None)
        if node.target is torch.ops.aten.copy_.default and place is not None and not node.users:
            new[place] = node.args[1]  # type: ignore[assignment]
            flat.graph.erase_node(node)
    flat.recompile()
    return flat, new
