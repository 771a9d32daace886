"""The joint graph of a layer becomes a forward graph and a backward graph that share the layer's inputs.

Backward gets all inputs of the layer again, so that sizes and views of inputs are computed there and only new
tensors are kept. With nothing kept it computes the whole forward again: checkpointing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from monograph.upstream.torch_names import GATHER, schema_of

# Shares memory with its input although its schema does not say so.
_SHARES_MEMORY = ("aten::_unsafe_view", "aten::lift_fresh")


def _is_view(node: Node) -> bool:
    schema = schema_of(node.target)
    if schema is None:
        return False
    shares = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return shares or schema.name in _SHARES_MEMORY


def owner(node: Node) -> Node:
    """The node whose memory a view shows; the node itself if it has its own."""
    while node.op == "call_function" and node.args:
        first = node.args[0]
        if not isinstance(first, Node):
            break
        if node.target is operator.getitem:
            if not _is_view(first):
                break
        elif not _is_view(node):
            break
        node = first
    return node


def gathered(graph: GraphModule) -> list[Node]:
    """What is computed from the shards of other ranks and from nothing else that changes: views of gathered
    bytes, a frozen weight in another dtype. Backward gathers again."""
    found: dict[Node, None] = {}
    for node in graph.graph.nodes:
        inputs = node.all_input_nodes
        collective = getattr(schema_of(node.target), "name", "") == GATHER
        if collective or (inputs and node.op == "call_function" and all(n in found for n in inputs)):
            found[node] = None
    return list(found)


def worth_keeping(nodes: Iterable[Node], outputs: Iterable[Node], never: Iterable[Node] = ()) -> list[Node]:
    """What a partitioner wants to keep, as tensors with memory of their own.

    Never an input, a view of one or an output: an operator's results may share no memory with its arguments
    or with each other. Whoever wants a view gets what it shows. never: what backward computes again.
    """
    kept: dict[Node, None] = {}
    for node in nodes:
        found = owner(node)
        if found.op != "placeholder" and isinstance(found.meta.get("val"), torch.Tensor):
            kept[found] = None
    for node in (n for n in never if n in kept):
        del kept[node]
    for output in outputs:
        kept.pop(owner(output), None)
    return list(kept)


def extracted(
    joint: GraphModule,
    inputs: Sequence[Node],
    outputs: Sequence[Node | None],
    effects: Sequence[Node] = (),
) -> GraphModule:
    """The graph that computes `outputs` from `inputs`, nodes of the joint graph, in its order. effects: what
    it does beside."""
    needed: set[Node] = set()
    waiting = [*(node for node in outputs if node is not None), *effects]
    given = set(inputs)
    while waiting:
        node = waiting.pop()
        if node not in needed and node not in given:
            needed.add(node)
            waiting.extend(node.all_input_nodes)
    graph = Graph()
    made: dict[Node, Node] = {}
    for node in inputs:
        made[node] = graph.placeholder(node.name)
        made[node].meta = dict(node.meta)
    for node in joint.graph.nodes:
        if node in needed:
            if node.op == "placeholder":
                raise ValueError(f"region: the graph reads {node.name}, which it does not get")
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output([None if node is None else made[node] for node in outputs])
    return GraphModule(joint, graph)


def norms_late(backward: GraphModule, tangents: int) -> None:
    """Norms of the layer's inputs are computed again for what gradients read of them, so that they need not
    stay while attention and MLP are computed backward: one tensor of the size of the layer's input less.

    tangents: how many of the last inputs are gradients.
    """
    inputs = backward.graph.find_nodes(op="placeholder")
    late: set[Node] = set(inputs[len(inputs) - tangents :])
    for node in backward.graph.nodes:
        if any(n in late for n in node.all_input_nodes):
            late.add(node)
    for norm in backward.graph.find_nodes(op="call_function", target=torch.ops.monograph.rms_norm.default):
        if any(n.op != "placeholder" for n in norm.all_input_nodes):
            continue
        readers = [(part, user) for part in norm.users for user in part.users if user in late]
        if not readers:
            continue
        order = {node: place for place, node in enumerate(backward.graph.nodes)}
        with backward.graph.inserting_before(min((user for _, user in readers), key=order.__getitem__)):
            made = {norm: backward.graph.node_copy(norm, lambda n: n)}
            copies = {part: backward.graph.node_copy(part, made.__getitem__) for part, _ in readers}
        for part, user in readers:
            user.replace_input_with(part, copies[part])
    backward.recompile()


def _drops_nothing(node: Node) -> bool:
    """An attention of torch whose dropout is off; its tag says that it may draw."""
    arguments = getattr(schema_of(node.target), "arguments", ())
    place = next((n for n, a in enumerate(arguments) if a.name == "dropout_p"), None)
    if place is None:
        return False
    given = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p")
    return bool((arguments[place].default_value if given is None else given) == 0)


def _replaceable(node: Node) -> Any:
    """What computes the same as an in-place operation of aten without writing; None if memory is shared."""
    schema, changed = schema_of(node.target), node.args[0] if node.args else None
    if schema is None or not schema.name.startswith("aten::") or not schema.name.endswith("_"):
        return None
    made = isinstance(changed, Node) and changed.op == "call_function" and owner(changed) is changed
    if not made or any(owner(user) is not user for user in changed.users if user is not node):  # type: ignore[union-attr]
        return None
    tensors = [argument.meta["val"] for argument in node.all_input_nodes]
    kinds = {t.dtype for t in tensors if isinstance(t, torch.Tensor)}
    plain = getattr(torch.ops.aten, schema.name.removeprefix("aten::")[:-1], None)
    name = schema.overload_name or "default"
    return getattr(plain, name, None) if len(kinds) == 1 else None


def without_writes(graph: GraphModule) -> None:
    """In-place operations on tensors that the layer made itself, and of which no view exists, become plain:
    those before see the old value, those behind the new one. A router divides its weights by their sum so."""
    order = {node: place for place, node in enumerate(graph.graph.nodes)}
    for node in graph.graph.nodes:
        mutable = getattr(schema_of(node.target), "is_mutable", False)
        if mutable and (plain := _replaceable(node)) is not None:
            changed, node.target = node.args[0], plain
            for user in list(changed.users):
                if order[user] > order[node]:
                    user.replace_input_with(changed, node)


def refuse_what_cannot_be_repeated(graph: GraphModule) -> None:
    """Recomputing must give the forward's numbers, and what is kept must not change."""
    for node in graph.graph.nodes:
        target: Any = node.target
        if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) and not _drops_nothing(node):
            raise ValueError(
                f"it draws random numbers with {target}, which a recomputation would draw anew; wanted "
                "dropout as nn.Dropout modules"
            )
        if getattr(schema_of(target), "is_mutable", False):
            raise ValueError(f"it changes a tensor in place with {target}")
