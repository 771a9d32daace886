"""doctor: runs two training steps and says whether the promise holds: one graph, no copy of a weight.

    report = mg.doctor(model, [batch, other_batch])
    print(report)           # graphs, breaks, recompiles with cause and line; what is saved for backward
    report.holds            # False: print(report) says why

For another trainer's loss give it as `loss`:

    mg.doctor(trainer.model, batches, loss=lambda model, batch: trainer.compute_loss(model, batch))
"""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

import torch
import torch._dynamo
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import optimization_hint

from monograph.nn.quant_linear import QuantLinear
from monograph.training.loss import forward_loss
from monograph.training.step import mark_lengths

Loss = Callable[[nn.Module, Any], torch.Tensor]


@dataclass(frozen=True)
class Cause:
    """Why a graph broke or was compiled again, and where in Python."""

    reason: str
    where: str


@dataclass
class Report:
    """What `doctor` found. bytes are for one micro-batch."""

    graphs: int = 0
    breaks: list[Cause] = field(default_factory=list)
    recompiles: list[Cause] = field(default_factory=list)
    saved_bytes: dict[str, int] = field(default_factory=dict)
    weight_copies: list[str] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    cache_hits: int = 0
    cache_misses: int = 0

    @property
    def holds(self) -> bool:
        return self.graphs == 1 and not (self.breaks or self.recompiles or self.weight_copies)

    def to_json(self) -> str:
        return json.dumps({"holds": self.holds, **asdict(self)}, indent=2)

    def __str__(self) -> str:
        lines = [
            f"graphs          {self.graphs}  (wanted 1)",
            f"graph breaks    {len(self.breaks)}  (wanted 0)",
            *_causes(self.breaks),
            f"recompiles      {len(self.recompiles)}  (wanted 0)",
            *_causes(self.recompiles),
            "saved for backward",
            *(f"  {kind:<28}{size / 2**20:10.2f} MiB" for kind, size in self.saved_bytes.items()),
            f"copies of a weight  {len(self.weight_copies)}  (wanted 0)",
            *(f"  {name}" for name in self.weight_copies),
            *self._times(),
            "The step is one graph." if self.holds else "The promise does not hold; see above.",
        ]
        return "\n".join(lines)

    def _times(self) -> list[str]:
        if not self.step_seconds:
            return []
        first, *_, last = self.step_seconds
        return [
            f"first step      {first:.1f} s with compilation, last {last:.2f} s; "
            f"compile cache: {self.cache_hits} hits, {self.cache_misses} misses"
        ]


def _causes(found: Sequence[Cause]) -> list[str]:
    return [f"  {cause.where}\n    {cause.reason}" for cause in found]


def doctor(
    model: nn.Module,
    batches: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    loss: Loss | None = None,
    inductor: bool = False,
) -> Report:
    """Forward and backward over the batches, compiled, without changing the model.

    batches: one batch, or several; with different lengths they also tell whether a new length compiles anew.
    loss: gives the loss of (model, batch); default: `forward_loss`, what `TrainStep` uses.
    inductor: also generate code, and tell how long that takes and what the compile cache had.
    """
    rows = [batches] if isinstance(batches, Mapping) else list(batches)
    if len(rows) == 1:
        rows = rows * 2
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("doctor: the model has no trainable parameter, wanted an adapter")
    compute = loss or forward_loss

    def run(batch: Any) -> torch.Tensor:
        return compute(model, batch)

    report = Report()
    was_training = model.training
    model.train()
    try:
        with _recompiles(report):
            _steps(run, rows, parameters, _counting(model, report))
        report.graphs = counters["stats"]["unique_graphs"] - len(report.recompiles)
        if counters["graph_break"] or report.graphs != 1:
            report.breaks = _breaks(run, _marked(rows[0]))
        if inductor:
            report.step_seconds = _steps(run, rows, parameters, "inductor")
            report.cache_hits = counters["inductor"]["fxgraph_cache_hit"]
            report.cache_misses = counters["inductor"]["fxgraph_cache_miss"]
    finally:
        torch._dynamo.reset()
        model.train(was_training)
    return report


def _steps(
    run: Callable[[Any], torch.Tensor], rows: Sequence[Any], parameters: Sequence[torch.Tensor], backend: Any
) -> list[float]:
    """The seconds of each forward and backward; the tracer's counters are this run's afterwards."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(run, backend=backend)
    seconds = []
    for row in rows:
        began = time.perf_counter()
        torch.autograd.grad(compiled(_marked(row)), parameters, allow_unused=True)
        seconds.append(time.perf_counter() - began)
    return seconds


def _marked(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with its lengths marked as TrainStep marks them, but as a wish: other models may fix them."""
    marked = {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in batch.items()
    }
    for value in marked.values():
        if isinstance(value, torch.Tensor):
            mark_lengths(value, torch._dynamo.maybe_mark_dynamic)
    return marked


def _breaks(run: Callable[[Any], torch.Tensor], batch: dict[str, Any]) -> list[Cause]:
    torch._dynamo.reset()
    found = torch._dynamo.explain(run)(batch).break_reasons
    causes = []
    for reason in found:
        frames = traceback.StackSummary.from_list(list(reason.user_stack))
        where = (
            f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "unknown line"
        )
        causes.append(Cause(reason.reason.strip().splitlines()[0], where))
    return causes


@contextmanager
def _recompiles(report: Report) -> Iterator[None]:
    """Collects the tracer's own log of recompilations."""

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            head, _, rest = record.getMessage().partition("\n")
            reasons = [line.strip().lstrip("- ") for line in rest.splitlines()[1:] if line.strip()]
            where = head.removeprefix("Recompiling function ")
            report.recompiles.append(Cause(reasons[0] if reasons else head, where))

    logger = logging.getLogger("torch._dynamo.guards.__recompiles")
    handler = Collect()
    state = (logger.level, logger.propagate)
    torch._logging._internal.log_state.enable_artifact("recompiles")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(state[0])
        logger.propagate = state[1]
        torch._logging._internal.log_state.artifact_names.discard("recompiles")


def _counting(model: nn.Module, report: Report) -> Any:
    """A backend that runs the graphs as they are and looks at what the forward keeps for the backward."""
    shapes: dict[tuple[int, ...], str] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, QuantLinear):
            shapes.setdefault((layer.out_features, layer.in_features), name)
            shapes.setdefault((layer.in_features, layer.out_features), name)

    def partition(joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        parts = min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)
        outputs = next(node for node in parts[0].graph.nodes if node.op == "output").args[0]
        for node in outputs[num_fwd_outputs:]:
            value = node.meta.get("val") if hasattr(node, "meta") else None
            if isinstance(value, torch.Tensor):
                _count_saved(report, node, value, shapes)
        return parts

    def as_it_is(graph: GraphModule, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=partition)


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
