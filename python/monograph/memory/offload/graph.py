"""Offload in a compiled step: nodes between a forward graph and its backward graph.

A partitioner cuts the joint graph in two and hands tensors from one to the other. `offload_saved` puts a
handle in the place of each large one:

    forward:   x = ...; handle = offload(x)                    # handed over: handle
    backward:  begun = reload(handle, after) ... x = wait(begun, after, shape, dtype)

`reload` stands one tensor ahead of its `wait`, so that the disk works while the layer behind is computed. The
last argument of `offload` differs in each, so that no pass merges two. Everything else stays what it was: one
graph each way, the same operators in the same order, the same bits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from monograph.memory.offload.activations import SMALLEST_BYTES
from monograph.ops import offload as _operators  # noqa: F401  (registers fakes)
from monograph.upstream.torch_names import (
    NO_VERSION_CHECK,
    CustomPartitionerFn,
    min_cut_rematerialization_partition,
    optimization_hint,
    schema_of,
    sympy_code,
)

_OFFLOAD = torch.ops.monograph.offload.default
_RELOAD = torch.ops.monograph.reload.default
_WAIT = torch.ops.monograph.wait.default


@dataclass(frozen=True)
class _Saved:
    """A tensor that is handed over: its node in the forward, its placeholder in the backward."""

    node: Node
    placeholder: Node
    order: tuple[int, ...]  # dimensions from the largest stride to the smallest

    @property
    def value(self) -> torch.Tensor:
        value: torch.Tensor = self.node.meta["val"]
        return value


def _comes_from_outside(node: Node) -> bool:
    """Whether it is an input of the graph or a view of one: then its memory is not ours to free."""
    while node.op == "call_function":
        if node.target is operator.getitem:
            node = node.args[0]  # type: ignore[assignment]
            continue
        schema = schema_of(node.target)
        first = schema.arguments[0] if schema is not None and schema.arguments else None
        if first is None or first.alias_info is None or schema.is_mutable or not node.all_input_nodes:
            return False
        node = node.all_input_nodes[0]
    return node.op != "call_function"


def _dense_order(value: torch.Tensor) -> tuple[int, ...] | None:
    """The order of dimensions in which a tensor is contiguous; None if it has holes or overlaps."""
    order = tuple(sorted(range(value.dim()), key=lambda d: -_hint(value.stride(d))))
    permuted = value.permute(order)
    return order if permuted.is_contiguous() else None


def _hint(size: Any) -> int:
    return int(optimization_hint(size)) if isinstance(size, torch.SymInt) else int(size)


def _bytes(value: torch.Tensor) -> int:
    count = value.element_size()
    for size in value.shape:
        count *= _hint(size)
    return count


def _chosen(forward: Graph, backward: Graph, outputs: int, min_bytes: int) -> list[_Saved]:
    results = _results(forward)
    given = {node for node in results[:outputs] if isinstance(node, Node)}
    placeholders = {node.name: node for node in backward.find_nodes(op="placeholder")}
    found = []
    for node in dict.fromkeys(n for n in results[outputs:] if isinstance(n, Node)):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or type(value).__name__ not in ("Tensor", "FakeTensor"):
            continue
        if node in given or node.name not in placeholders or _comes_from_outside(node):
            continue
        if not placeholders[node.name].users or _bytes(value) < max(min_bytes, 1):
            continue
        order = _dense_order(value)
        if order is not None:
            found.append(_Saved(node, placeholders[node.name], order))
    return found


def _results(graph: Graph) -> list[Any]:
    (output,) = graph.find_nodes(op="output")
    return list(output.args[0])


def _call(graph: Graph, target: Any, arguments: tuple[Any, ...], value: Any) -> Node:
    node = graph.call_function(target, arguments)
    node.meta["val"] = value
    return node


def _handle_like(value: torch.Tensor) -> torch.Tensor:
    if value.device.type == "cpu":
        return value.new_empty([2], dtype=torch.int64)
    return value.new_empty(value.shape, device="cpu")


class _Backward:
    """The backward graph while it changes."""

    def __init__(self, forward: Graph, backward: Graph) -> None:
        self.forward, self.graph = forward, backward
        self.sizes = {
            sympy_code(node.meta["val"]): node
            for node in backward.find_nodes(op="placeholder")
            if isinstance(node.meta.get("val"), torch.SymInt)
        }

    def size(self, saved: _Saved, dimension: int) -> Any:
        """A size of a saved tensor in the backward graph: a number, or a node that is handed over too."""
        size = saved.value.shape[dimension]
        if not isinstance(size, torch.SymInt):
            return size
        name = sympy_code(size)
        if name not in self.sizes:
            self.sizes[name] = self._handed_over(saved, dimension, size)
        return self.sizes[name]

    def _handed_over(self, saved: _Saved, dimension: int, size: torch.SymInt) -> Node:
        """Sizes are the last results of a forward and the first inputs of its backward."""
        (output,) = self.forward.find_nodes(op="output")
        with self.forward.inserting_before(output):
            node = _call(self.forward, torch.ops.aten.sym_size.int, (saved.node, dimension), size)
        output.args = ([*output.args[0], node],)
        for place in self.graph.find_nodes(op="placeholder"):
            if not isinstance(place.meta.get("val"), torch.SymInt):
                with self.graph.inserting_before(place):
                    made = self.graph.placeholder(node.name)
                made.meta["val"] = size
                return made
        raise AssertionError("a backward graph without tensors")


def _first_use(graph: Graph, node: Node) -> Node:
    users = set(node.users)
    return next(n for n in graph.nodes if n in users)


def _tensor_before(place: Node, otherwise: Node) -> Node:
    """The last tensor that is computed before a node: what a pass that reorders must leave before it."""
    node = place.prev
    while node.op == "call_function":
        if isinstance(node.meta.get("val"), torch.Tensor) and node.target is not _RELOAD:
            return node
        node = node.prev
    return otherwise


def offload_saved(
    forward: GraphModule, backward: GraphModule, outputs: int, min_bytes: int = SMALLEST_BYTES
) -> int:
    """Changes both graphs in place; gives the number of tensors that leave memory. `outputs`: how many
    results of the forward are for its caller."""
    chosen = _chosen(forward.graph, backward.graph, outputs, min_bytes)
    if not chosen:
        return 0
    changed = _Backward(forward.graph, backward.graph)
    position = {node: number for number, node in enumerate(backward.graph.nodes)}
    uses = {s: _first_use(backward.graph, s.placeholder) for s in chosen}
    chosen.sort(key=lambda s: position[uses[s]])
    otherwise = backward.graph.find_nodes(op="placeholder")[-1]  # a gradient that comes in
    for number, saved in enumerate(chosen):
        handle = _leave(forward.graph, saved, number)
        ahead = uses[chosen[number - 1]] if number else uses[saved]
        _come_back(changed, saved, handle, ahead, uses[saved], otherwise)
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()
    return len(chosen)


def _leave(graph: Graph, saved: _Saved, slot: int) -> Node:
    """The handle in place of the tensor among the results."""
    value = saved.value
    with graph.inserting_after(saved.node):
        source = saved.node
        if saved.order != tuple(range(value.dim())):
            permuted = value.permute(saved.order)
            source = _call(graph, torch.ops.aten.permute.default, (source, list(saved.order)), permuted)
            value = permuted
    with graph.inserting_after(source):
        handle = _call(graph, _OFFLOAD, (source, 0, slot), _handle_like(value))
    if NO_VERSION_CHECK in saved.node.meta:  # those are counted by this mark
        handle.meta[NO_VERSION_CHECK] = saved.node.meta[NO_VERSION_CHECK]
    (output,) = graph.find_nodes(op="output")
    output.args = ([handle if node is saved.node else node for node in output.args[0]],)
    return handle


def _come_back(
    changed: _Backward, saved: _Saved, handle: Node, ahead: Node, use: Node, otherwise: Node
) -> None:
    graph, value = changed.graph, saved.value.permute(saved.order)
    shape = [changed.size(saved, dimension) for dimension in saved.order]
    with graph.inserting_before(saved.placeholder):
        given = graph.placeholder(handle.name)
    given.meta["val"] = handle.meta["val"]
    begun_value = saved.value.new_empty([2], dtype=torch.int64, device="cpu")
    with graph.inserting_before(ahead):
        begun = _call(graph, _RELOAD, (given, _tensor_before(ahead, otherwise)), begun_value)
    with graph.inserting_before(use):
        after = _tensor_before(use, otherwise)
        found = _call(graph, _WAIT, (begun, after, shape, value.dtype), value)
        if saved.order != tuple(range(value.dim())):
            back = [saved.order.index(dimension) for dimension in range(value.dim())]
            found = _call(graph, torch.ops.aten.permute.default, (found, back), saved.value)
    saved.placeholder.replace_all_uses_with(found)
    graph.erase_node(saved.placeholder)


def offloading(partition: Callable[..., Any], min_bytes: int = SMALLEST_BYTES) -> Callable[..., Any]:
    """A partitioner whose graphs offload what they hand over."""

    def partitioned(
        joint: GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **options: Any
    ) -> Any:
        forward, backward = partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)
        offload_saved(forward, backward, num_fwd_outputs, min_bytes)
        return forward, backward

    return partitioned


class OffloadingPartitioner(CustomPartitionerFn):  # type: ignore[misc]
    """For Inductor: torch.compile(f, options={"custom_partitioner_fn": OffloadingPartitioner()})."""

    def __init__(self, min_bytes: int = SMALLEST_BYTES) -> None:
        self.min_bytes = min_bytes

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[Any], **options: Any) -> Any:
        options.setdefault("compiler", "inductor")
        return offloading(min_cut_rematerialization_partition, self.min_bytes)(gm, joint_inputs, **options)

    def uuid(self) -> Any:
        return f"monograph offload 1 {self.min_bytes}"
