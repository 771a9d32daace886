"""The backend of an outer graph: it runs as it is, and backward gets as little as possible.

What comes before the first region (embedding, rotary tables, boundaries of documents) is computed again in
backward: it costs next to nothing, and all that a step with checkpointing keeps are the inputs of the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from monograph.upstream.torch_names import (
    aot_autograd,
    boxed,
    compute_again,
    min_cut_rematerialization_partition,
    schema_of,
)

_PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::convolution")


def partition(joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
    """torch's partitioner, told what not to keep."""
    for node in _cheap(joint):
        compute_again(node.meta)
    return min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)


def _cheap(joint: GraphModule) -> list[Node]:
    """What regions read and no operator of ours, no product of size and no random number is behind."""
    cheap: dict[Node, bool] = {}
    for node in joint.graph.nodes:
        before = all(cheap.get(n, False) for n in node.all_input_nodes)
        cheap[node] = node.op == "placeholder" or (
            before and node.op == "call_function" and _costs_little(node)
        )
    read: set[Node] = set()
    waiting = [
        n
        for node in joint.graph.nodes
        if node.target is torch.ops.monograph.region.default
        for n in node.all_input_nodes
    ]
    while waiting:
        node = waiting.pop()
        if node not in read and cheap[node] and node.op != "placeholder":
            read.add(node)
            waiting.extend(node.all_input_nodes)
    return [node for node in joint.graph.nodes if node in read]


def _costs_little(node: Node) -> bool:
    schema = schema_of(node.target)
    if schema is None:
        return True  # sizes, getitem
    if not schema.name.startswith("aten::") or schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return False
    if schema.name in _PRODUCTS:  # the rotary angles are a product with one column
        first = node.args[0]
        return isinstance(first, Node) and first.meta["val"].shape[-1] == 1
    return True


def _as_it_is(graph: GraphModule, inputs: Any) -> Any:
    return boxed(graph)


def outer_graph(graph: GraphModule, inputs: Any, partition_fn: Callable[..., Any] = partition) -> Any:
    """A backend for torch.compile."""
    compiled = aot_autograd(
        fw_compiler=_as_it_is,
        bw_compiler=_as_it_is,
        partition_fn=partition_fn,
        keep_inference_input_mutations=True,
    )
    return compiled(graph, inputs)
