"""Tracing a layer once for all lengths: a joint graph with symbolic sizes, split in forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from monograph.ops import seeded_dropout_many, token_slices  # noqa: F401  (registers the operators)
from monograph.ops.seeded_dropout import SeededDropout
from monograph.training.regions.call import differentiated
from monograph.training.regions.layer_function import Request, beside, run
from monograph.training.regions.lengths import KeptShape, fixed_sizes, guard, kept_shape
from monograph.training.regions.partition import (
    extracted,
    gathered,
    norms_late,
    refuse_what_cannot_be_repeated,
    worth_keeping,
)
from monograph.training.regions.purity import Purity
from monograph.training.regions.reads import Reads
from monograph.training.regions.writes import functional
from monograph.upstream.torch_names import (
    ConstantSource,
    DimDynamic,
    FakeTensorMode,
    ShapeEnv,
    StatelessSymbolicContext,
    as_if_not_compiling,
    compute_again,
    enable_python_dispatcher,
    make_fx,
    min_cut_rematerialization_partition,
)

_SLICED = (
    torch.ops.monograph.token_slices.default,
    torch.ops.monograph.token_slices_backward.default,
)
FORWARD, RECOMPUTE, KEEP = "forward", "recompute", "keep"
MODES = {
    FORWARD: "no gradient is wanted",
    RECOMPUTE: "backward computes the forward again: gradient checkpointing",
    KEEP: "backward gets what the forward kept",
}


@dataclass(frozen=True)
class Traced:
    """forward(*activations, *seed, *trained, *frozen, *streams) -> [output, *beside, *kept];
    backward(the same, *beside, *kept, dy, *dbeside) -> gradients of the hidden states, of the other
    activations that are differentiated and of what is trained.
    """

    number: int
    forward: GraphModule
    backward: GraphModule | None
    frozen: tuple[str, ...]
    read: tuple[str, ...]  # those of the frozen that backward reads
    kept: tuple[KeptShape, ...]  # those beside the hidden states first
    symbols: tuple[tuple[int, int], ...]  # (activation, dimension) of each size that may change
    guard: Callable[[Sequence[int]], bool]
    reads: Reads  # what its Python code read
    written: tuple[str, ...]  # frozen tensors whose new values the forward gives last

    def holds(self, activations: Sequence[torch.Tensor]) -> bool:
        """Whether these lengths have the relations that tracing relied on."""
        return self.guard([activations[place].shape[dim] for place, dim in self.symbols])

    def kept_like(self, activations: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the forward would give behind its output for these (symbolic) lengths."""
        lengths = [activations[place].shape[dim] for place, dim in self.symbols]
        return [
            torch.empty_strided(
                [size(*lengths) for size in shape.sizes],
                [stride(*lengths) for stride in shape.strides],
                dtype=shape.dtype,
                device=shape.device,
            )
            for shape in self.kept
        ]


def _faked(request: Request, env: Any) -> tuple[list[torch.Tensor], Any]:
    mode = FakeTensorMode(shape_env=env)
    mode.cache_enabled = False  # its keys cost more than what a layer repeats

    wanted = differentiated(request.call)

    def lengths(tensor: torch.Tensor, place: int) -> torch.Tensor:
        fixed = fixed_sizes(tensor, place == -1 or place in wanted)
        context = StatelessSymbolicContext(
            dynamic_sizes=[DimDynamic.STATIC if one else DimDynamic.DYNAMIC for one in fixed]
        )
        source = ConstantSource(f"activation_{place + 1}")
        return mode.from_tensor(tensor.detach(), source=source, symbolic_context=context)

    found = [lengths(t, place) for place, t in enumerate(request.activations, -1)]
    fixed = [] if request.seed is None else [request.seed]
    fixed += [*request.trained, *request.frozen.values()]
    # Two names of one tensor would be one fake, and the gradient of one the gradient of both.
    found += [mode.from_tensor(t.detach(), static_shapes=True) for t in fixed]
    return found, mode


def trace(request: Request, number: int) -> Traced:
    """In a thread of its own, which sees nothing of what goes on around the call: the operator is called
    below autograd, and its fake while somebody else traces. What is traced is what eager mode computes."""
    with ThreadPoolExecutor(max_workers=1) as thread, as_if_not_compiling():
        return thread.submit(copy_context().run, _trace, request, number).result()


def _trace(request: Request, number: int) -> Traced:
    purity = Purity(request, differentiated=request.mode != FORWARD)
    with purity.holds():
        graph, written, primals, env = _graph(request)
    refuse_what_cannot_be_repeated(graph)
    return _split(request, graph, written, primals, env, number, purity.reads)


def _graph(request: Request) -> tuple[GraphModule, dict[int, Node], Any, Any]:
    """The joint graph, what it writes into frozen tensors, its inputs and what is known of its sizes."""
    env = ShapeEnv(duck_shape=False)
    primals, mode = _faked(request, env)
    counts = [len(request.activations), int(request.seed is not None), len(request.trained)]
    begins = [0, counts[0], counts[0] + counts[1], sum(counts)]

    def forward(given: list[torch.Tensor]) -> list[torch.Tensor]:
        seed = given[begins[1]] if request.seed is not None else None
        with request.autocast():
            return run(request, given[: begins[1]], seed, given[begins[2] : begins[3]], given[begins[3] :])

    def wanted_of(primals: list[torch.Tensor]) -> list[torch.Tensor]:
        also = [primals[1 + place] for place in differentiated(request.call)]
        return [primals[0], *also, *primals[begins[2] : begins[3]]]

    def joint(primals: list[torch.Tensor], tangents: list[torch.Tensor]) -> list[torch.Tensor]:
        outputs, wanted = forward(primals), wanted_of(primals)
        gradients = torch.autograd.grad(outputs, wanted, tangents, allow_unused=True)
        return [
            *outputs,
            *(torch.zeros_like(w) if g is None else g for w, g in zip(wanted, gradients, strict=True)),
        ]

    with mode, enable_python_dispatcher():
        if request.mode == FORWARD:
            tangents: list[torch.Tensor] = []
            with torch.no_grad():
                graph = make_fx(lambda primals, tangents: forward(primals))(primals, [])
        else:
            with torch.no_grad():
                shapes = forward(primals)[1:] if beside(request.layer) else []
            for tensor in wanted_of(primals):
                tensor.requires_grad_(True)
            plain = torch.contiguous_format  # as backward gets them
            tangents = [torch.empty_like(t, memory_format=plain).detach() for t in (primals[0], *shapes)]
            with torch.enable_grad():
                graph = make_fx(joint)(primals, tangents)
        graph.graph.eliminate_dead_code()
        graph, written = functional(graph, primals, tangents, range(begins[3], len(primals)))
    return graph, written, primals, env


def _split(
    request: Request,
    graph: GraphModule,
    written: dict[int, Node],
    primals: Any,
    env: Any,
    number: int,
    reads: Reads,
) -> Traced:
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    inputs, tangents = nodes[: len(primals)], nodes[len(primals) :]
    results = next(n for n in graph.graph.nodes if n.op == "output").args[0]
    first = 1 + beside(request.layer)
    outputs, gradients = results[:first], results[first:]
    found, wanted = outputs[0].meta["val"], primals[0]
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        raise ValueError(f"it returns {found.dtype} {list(found.shape)}, wanted those of its input")
    kept: list[Node] = []
    if request.mode == KEEP:
        copied = extracted(graph, nodes, [*outputs, *gradients])  # the partitioner changes its graph
        given = [*primals, wanted, *(n.meta["val"] for n in outputs[1:])]
        for node in gathered(copied):
            compute_again(node.meta)
        chosen = min_cut_rematerialization_partition(copied, given, num_fwd_outputs=first)[0]
        names = {n.name for n in next(n for n in chosen.graph.nodes if n.op == "output").args[0][first:]}
        kept = worth_keeping([n for n in graph.graph.nodes if n.name in names], outputs, gathered(graph))
    kept = [*outputs[1:], *kept]
    streams = _streams_as_inputs(graph, request.layer)
    inputs = [*inputs, *streams]
    forward = extracted(graph, inputs, [outputs[0], *kept, *written.values()])
    backward = extracted(graph, [*inputs, *kept, *tangents], gradients) if gradients else None
    if backward is not None and request.mode == RECOMPUTE:
        norms_late(backward, len(tangents))
    symbols = [
        (place, dim, tensor.shape[dim])
        for place, tensor in enumerate(primals[: len(request.activations)])
        for dim in range(tensor.dim())
        if isinstance(tensor.shape[dim], torch.SymInt)
    ]
    lengths = [size for _, _, size in symbols]
    shapes = tuple(kept_shape(node.meta["val"], lengths) for node in kept)
    places = tuple((place, dim) for place, dim, _ in symbols)
    frozen = tuple(request.frozen)
    begin = len(primals) - len(frozen)
    read, changed = _read(backward, begin, frozen), tuple(frozen[place - begin] for place in written)
    return Traced(
        number, forward, backward, frozen, read, shapes, places, guard(env, lengths), reads, changed
    )


def _read(backward: GraphModule | None, begin: int, frozen: tuple[str, ...]) -> tuple[str, ...]:
    """The frozen tensors, inputs from `begin` on, that a graph reads."""
    if backward is None:
        return ()
    inputs = [node for node in backward.graph.nodes if node.op == "placeholder"][begin:]
    return tuple(name for name, node in zip(frozen, inputs, strict=False) if node.users)


def _streams_as_inputs(graph: GraphModule, layer: nn.Module) -> list[Node]:
    """The streams of a layer's dropouts, constants of the trace, become inputs of the graph."""
    streams = [m.stream for m in layer.modules() if isinstance(m, SeededDropout)]
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    made = []
    for place in range(len(streams)):
        with graph.graph.inserting_after(last):
            last = graph.graph.placeholder(f"stream_{place}")
        made.append(last)
    by_number = dict(zip(streams, made, strict=True))
    for node in graph.graph.nodes:
        if node.target is torch.ops.monograph.seeded_dropout.default and by_number:
            node.args = (*node.args[:2], by_number[node.args[2]], node.args[3])
        elif node.target is torch.ops.monograph.seeded_dropout_many.default and by_number:
            node.args = (*node.args[:4], [by_number[stream] for stream in node.args[4]], node.args[5])
        elif node.target in _SLICED and by_number:
            node.args = (*node.args[:5], [by_number[stream] for stream in node.args[5]], *node.args[6:])
    return made
