"""A row-wise module as a body of monograph::token_slices: traced once, then computed slice by slice.

Only what keeps its bits is taken: operators whose rows do not depend on their number, exact elementwise ones,
and sums over tokens by `gram` alone, which a slice continues where the one before ended. All else is refused
by name.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.fx import GraphModule, Node

from monograph.ops import token_slices
from monograph.ops.token_slices import Body
from monograph.training.regions.layer_function import Request
from monograph.training.regions.partition import extracted
from monograph.training.regions.reads import Reads
from monograph.training.regions.trace import trace
from monograph.upstream.torch_names import schema_of

_GRAM = torch.ops.monograph.gram.default
_DROPOUT = torch.ops.monograph.seeded_dropout.default
_PART = torch.ops.monograph.seeded_dropout_part.default
_CAST = torch.ops.aten.to.dtype

# A row of their results has the same bits in any batch.
_BY_ROWS = (
    "linear linear_dx linear_shared linear_shared_dx silu_mul silu_mul_backward gelu_mul gelu_mul_backward "
    "seeded_dropout"
)
# Exact, or rounded once by one rule for elements of a vector and those behind the last one.
_EXACT = (
    "add sub mul div neg view _unsafe_view clone _to_copy split split_with_sizes cat detach alias "
    "index_select sym_size sym_numel"
)
_TAKEN = frozenset(
    [*(f"monograph::{name}" for name in _BY_ROWS.split()), *(f"aten::{name}" for name in _EXACT.split())]
)
_WANTED = (
    "a quantised base or LoRA on each of its linear layers, and a gated activation that monograph.optimize "
    "knows"
)


def make_body(request: Request) -> tuple[str, Reads]:
    """The word of the body of a module, and what its Python code read."""
    traced = trace(request, -1)
    if traced.written:
        raise ValueError(f"it writes into {traced.written[0]}, wanted a module without effects")
    forward = _of_a_slice(traced.forward, _results(traced.forward)[:1], [])
    if traced.backward is None:
        return token_slices.enter(Body(forward, None, None, 0)), traced.reads
    sums = traced.backward.graph.find_nodes(op="call_function", target=_GRAM)
    backward = _of_a_slice(traced.backward, [_results(traced.backward)[0], *sums], sums)
    finish = _finish(request, traced.backward, sums)
    return token_slices.enter(Body(forward, backward, finish, len(sums))), traced.reads


def _results(module: GraphModule) -> list[Node]:
    (output,) = module.graph.find_nodes(op="output")
    return list(output.args[0])


def _has_tokens(node: Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return any(
        isinstance(v, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in v.shape) for v in values
    )


def _check(node: Node) -> None:
    if node.op != "call_function" or not any(_has_tokens(n) for n in (node, *node.all_input_nodes)):
        return
    name = getattr(schema_of(node.target), "name", str(node.target))
    if node.target is _GRAM or node.target is operator.getitem:
        return
    if name not in _TAKEN:
        raise ValueError(f"it computes {name}, whose rows may depend on how many there are; wanted {_WANTED}")
    if isinstance(node.meta.get("val"), torch.Tensor) and not _has_tokens(node):
        raise ValueError(f"it sums over tokens by {name}, wanted gram alone: factors of LoRA")


def _of_a_slice(module: GraphModule, results: Sequence[Node], sums: Sequence[Node]) -> GraphModule:
    """The graph of these results for a slice that begins at a row, whose sums go on from those before."""
    made = extracted(module, module.graph.find_nodes(op="placeholder"), results)
    for node in made.graph.nodes:
        _check(node)
    last = made.graph.find_nodes(op="placeholder")[-1]
    with made.graph.inserting_after(last):
        first = last = made.graph.placeholder("first_row")
    for number, node in enumerate(_results(made)[1:]):
        with made.graph.inserting_after(last):
            last = made.graph.placeholder(f"sum_so_far_{number}")
        node.args = (*node.args[:2], last, torch.float32)
    for node in made.graph.find_nodes(op="call_function", target=_DROPOUT):
        with made.graph.inserting_before(node):
            place = made.graph.call_function(operator.mul, (first, node.meta["val"].shape[-1]))
        node.target, node.args = _PART, (*node.args, place)
    made.recompile()
    return made


def _finish(request: Request, backward: GraphModule, sums: Sequence[Node]) -> GraphModule:
    """The gradients of the trained parameters from their sums."""
    inputs = backward.graph.find_nodes(op="placeholder")
    begin = len(request.activations) + (request.seed is not None)
    tensors = inputs[begin : begin + len(request.trained) + len(request.frozen)]
    gradients: list[Node] = _results(backward)[1:]
    for part, gradient in zip(request.layout.parts, gradients, strict=True):
        try:
            extracted(backward, [*tensors, *sums], [gradient])
        except ValueError as error:
            name = part[0][0]
            raise ValueError(
                f"the gradient of {name} is not made of sums by gram, wanted LoRA's factors"
            ) from error
    made = extracted(backward, [*tensors, *sums], gradients)
    for given, node in zip(made.graph.find_nodes(op="placeholder")[len(tensors) :], sums, strict=True):
        dtype: Any = node.args[3]
        if dtype != torch.float32:
            with made.graph.inserting_after(given):
                cast = made.graph.call_function(_CAST, (given, dtype))
            given.replace_all_uses_with(cast, lambda user, cast=cast: user is not cast)
    # Casts stand behind the inputs.
    order = made.graph.find_nodes(op="placeholder")
    for before, node in pairwise(order):
        before.append(node)
    made.graph.lint()
    made.recompile()
    return made
