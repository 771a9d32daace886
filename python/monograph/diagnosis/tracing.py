"""What the tracer did: graphs, breaks and recompiles with their causes, and what is saved for backward."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from monograph.diagnosis.progress import Progress
from monograph.diagnosis.report import Cause, Report
from monograph.diagnosis.sharding import GatherCount
from monograph.nn.quant_linear import QuantLinear
from monograph.training.regions import region_layers
from monograph.training.regions.outer_graph import partition as outer_partition
from monograph.upstream.torch_names import (
    RECOMPILES_LOG,
    aot_autograd,
    compile_context,
    counters,
    graph_break_reasons,
    log_state,
    make_boxed_func,
    min_cut_rematerialization_partition,
    optimization_hint,
)


def forget() -> None:
    """What was compiled before is gone, and so are the tracer's counters and causes."""
    torch.compiler.reset()
    counters.clear()
    graph_break_reasons.clear()


def breaks() -> list[Cause]:
    """The breaks since `forget`, each line with its reason once.

    A break inside a function that was inlined is met again when that function is traced by itself, which is
    what `times` counts.
    """
    times: dict[Cause, int] = {}
    for found in graph_break_reasons:
        frames = list(found.user_stack)
        where = (
            f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "unknown line"
        )
        cause = Cause(found.reason.strip().splitlines()[0], where)
        times[cause] = times.get(cause, 0) + 1
    return [replace(cause, times=number) for cause, number in times.items()]


@contextmanager
def recompiles(report: Report) -> Iterator[None]:
    """Collects the tracer's own log of recompilations."""

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            head, _, rest = record.getMessage().partition("\n")
            reasons = [line.strip().lstrip("- ") for line in rest.splitlines()[1:] if line.strip()]
            where = head.removeprefix("Recompiling function ")
            report.recompiles.append(Cause(reasons[0] if reasons else head, where))

    logger = logging.getLogger(RECOMPILES_LOG)
    handler = Collect()
    state = (logger.level, logger.propagate)
    log_state.enable_artifact("recompiles")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(state[0])
        logger.propagate = state[1]
        log_state.artifact_names.discard("recompiles")


def packed_shapes(model: nn.Module) -> dict[tuple[int, ...], str]:
    """The shapes of packed weights, upright and transposed, each with the name of a layer."""
    shapes: dict[tuple[int, ...], str] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, QuantLinear):
            shapes.setdefault((layer.out_features, layer.in_features), name)
            shapes.setdefault((layer.in_features, layer.out_features), name)
    return shapes


def counting(model: nn.Module, report: Report, progress: Progress, gathers: GatherCount | None = None) -> Any:
    """A backend that counts the graphs, runs them as they are and looks at what is kept for the backward."""
    shapes = packed_shapes(model)

    def partition(joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        divide = outer_partition if region_layers(model) else min_cut_rematerialization_partition
        parts = divide(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)
        outputs = next(node for node in parts[0].graph.nodes if node.op == "output").args[0]
        if gathers is not None and _first_time():
            gathers.add("forward", parts[0])
            gathers.add("backward", parts[1])
        for node in outputs[num_fwd_outputs:] if _first_time() else ():
            value = node.meta.get("val") if hasattr(node, "meta") else None
            if isinstance(value, torch.Tensor):
                _count_saved(report, node, value, shapes)
        return parts

    def as_it_is(graph: GraphModule, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    compile_graph = aot_autograd(fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=partition)

    def backend(graph: GraphModule, inputs: Any) -> Any:
        first = _first_time()
        report.graphs += first
        nodes = len(graph.graph.nodes)
        progress.say(f"graph {report.graphs} of {nodes} nodes" if first else f"a recompile, {nodes} nodes")
        return compile_graph(graph, inputs)

    return backend


def _first_time() -> bool:
    """Whether the frame that is being compiled was not compiled before: else it is a recompile."""
    compiling = compile_context.current_compile_id()
    return compiling is None or compiling.frame_compile_id == 0


def _count_saved(report: Report, node: Any, value: torch.Tensor, shapes: dict[tuple[int, ...], str]) -> None:
    size = prod(optimization_hint(n, fallback=0) for n in value.shape)
    size *= value.element_size()
    if node.op == "placeholder":
        kind = "packed weights, no copy" if value.dtype == torch.uint8 else "parameters and inputs, no copy"
    elif value.is_floating_point():
        kind = f"activations {str(value.dtype).removeprefix('torch.')}"
        shape = tuple(value.shape)
        if all(isinstance(n, int) for n in shape) and shape in shapes:
            report.weight_copies.append(f"{node.name} {shape} {value.dtype}: the size of {shapes[shape]}")
    else:
        kind = f"other {str(value.dtype).removeprefix('torch.')}"
    report.saved_bytes[kind] = report.saved_bytes.get(kind, 0) + size
