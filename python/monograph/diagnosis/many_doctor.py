"""What `doctor` says of several adapters on one base: what is traced when one retires and another joins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from monograph.diagnosis.progress import Progress
from monograph.diagnosis.report import Cause, Report
from monograph.diagnosis.tracing import forget, recompiles
from monograph.many import adapter_run, step
from monograph.training.regions import TRACES
from monograph.training.regions import forget as forget_regions
from monograph.upstream.torch_names import counters

Batches = Sequence[Mapping[str, Any]]


@dataclass
class ManyReport:
    """graphs, layer_traces: those of the first step of all adapters together; later_graphs, later_traces:
    what was added by other lengths, and by the adapter that took the place of one that retired."""

    adapters: list[str] = field(default_factory=list)
    mode: str = "graph"
    graphs: int = 0
    layer_traces: int = 0
    later_graphs: int = 0
    later_traces: int = 0
    recompiles: list[Cause] = field(default_factory=list)
    retired: str = ""

    @property
    def holds(self) -> bool:
        return not (self.later_graphs or self.later_traces or self.recompiles)

    def to_json(self) -> str:
        return json.dumps({"schema_version": 1, "holds": self.holds, **asdict(self)}, indent=2)

    def __str__(self) -> str:
        return "\n".join(
            [
                f"adapters        {len(self.adapters)}, mode {self.mode}: {', '.join(self.adapters)}",
                f"graphs          {self.graphs}, and {self.layer_traces} traces of layers that they share",
                f"retired         {self.retired}, and another one joined in its place",
                f"later           {self.later_graphs} graphs, {self.later_traces} traces  (wanted 0)",
                f"recompiles      {len(self.recompiles)}  (wanted 0)",
                *(f"  {cause.where}\n    {cause.reason}" for cause in self.recompiles),
                "Adapters join and retire, and nothing is compiled."
                if self.holds
                else "The promise does not hold; see above.",
            ]
        )


def doctor_many(
    base: nn.Module,
    runs: Mapping[str, adapter_run.AdapterRun],
    batches: Mapping[str, Sequence[Batches]],
    *,
    mode: str = "graph",
    quiet: bool = False,
) -> ManyReport:
    """Steps of all adapters; then the first retires, and one of its kind with another seed joins.

    batches: of each adapter the micro-batches of two steps or more; with other lengths they also tell whether
    a new length compiles anew. The base is not changed.
    """
    if not runs:
        raise ValueError("doctor: no adapter, wanted one or more")
    say = Progress(not quiet).say
    found, seen = ManyReport(list(runs), mode), Report()
    forget()
    forget_regions()
    with recompiles(seen):
        say(f"the first step of {len(runs)} adapters, which takes longest")
        many = step.ManyStep(base, runs, mode=mode)
        many({name: batches[name][0] for name in runs})
        found.graphs, found.layer_traces = _graphs(), len(TRACES.by_number)
        for number in range(1, max(len(own) for own in batches.values())):
            say(f"step {number + 1}")
            many({name: own[number] for name, own in batches.items() if number < len(own)})
        found.retired = next(iter(runs))
        say(f"{found.retired} retires and another one joins")
        retired = runs[found.retired]
        many.retire(found.retired)
        many({name: batches[name][0] for name in many.names})
        many.join(found.retired, adapter_run.AdapterRun(**(vars(retired) | {"seed": retired.seed + 1})))
        many({name: batches[name][0] for name in many.names})
    found.recompiles = seen.recompiles
    found.later_graphs = _graphs() - found.graphs
    found.later_traces = len(TRACES.by_number) - found.layer_traces
    return found


def _graphs() -> int:
    return int(counters["stats"]["unique_graphs"])
