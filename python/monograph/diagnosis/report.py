"""What `doctor` found, for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from monograph.ops.providers import choices
from monograph.ops.show_config import kernels_in_use


@dataclass(frozen=True)
class Cause:
    """Why a graph broke or was compiled again, and where in Python."""

    reason: str
    where: str
    times: int = 1


@dataclass(frozen=True)
class Gathers:
    """How often units of one size were gathered in a micro-batch. units: their paths; shard_bytes: of one."""

    units: list[str]
    shard_bytes: int
    forward: int
    backward: int

    @property
    def holds(self) -> bool:
        return self.forward == len(self.units) and self.backward <= len(self.units)


def providers_of(device_type: str) -> dict[str, str]:
    """Who computes each operator there."""
    return {operator: choice.provider for operator, choice in choices(device_type).items()}


@dataclass
class Report:
    """What `doctor` found. bytes are for one micro-batch. Regions are layers that are operators; they have
    inner graphs, one or two per kind of layer. notes: what was asked for and is not so, and what those who
    compute an operator say of the card.

    Of a sharded model: shard_bytes that this rank holds, received_bytes that a micro-batch's gathers bring in
    forward and backward, whole_bytes that are not sharded, by reason.
    """

    graphs: int = 0
    regions: int = 0
    region_kinds: int = 0
    inner_graphs: int = 0
    breaks: list[Cause] = field(default_factory=list)
    recompiles: list[Cause] = field(default_factory=list)
    saved_bytes: dict[str, int] = field(default_factory=dict)
    weight_copies: list[str] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    cache_hits: int = 0
    cache_misses: int = 0
    notes: list[str] = field(default_factory=list)
    ranks: int = 1
    shard_ranks: int = 1
    shard_bytes: int = 0
    gathers: list[Gathers] = field(default_factory=list)
    received_bytes: dict[str, int] = field(default_factory=dict)
    whole_bytes: dict[str, int] = field(default_factory=dict)
    gradient_bytes: int = 0
    providers: dict[str, str] = field(default_factory=dict)  # who computes an operator on the device
    other_ranks: list[str] = field(default_factory=list)  # what they found otherwise
    isa: str = field(default_factory=kernels_in_use)  # which the kernels of the CPU use

    @property
    def holds(self) -> bool:
        wrong = self.breaks or self.recompiles or self.weight_copies or self.other_ranks
        return self.graphs == 1 and not wrong and all(found.holds for found in self.gathers)

    def to_json(self) -> str:
        return json.dumps({"holds": self.holds, **asdict(self)}, indent=2)

    def __str__(self) -> str:
        lines = [
            f"graphs          {self.graphs}  (wanted 1)",
            *self._regions(),
            f"graph breaks    {len(self.breaks)}  (wanted 0)",
            *_causes(self.breaks),
            f"recompiles      {len(self.recompiles)}  (wanted 0)",
            *_causes(self.recompiles),
            "saved for backward",
            *(f"  {kind:<28}{size / 2**20:10.2f} MiB" for kind, size in self.saved_bytes.items()),
            f"copies of a weight  {len(self.weight_copies)}  (wanted 0)",
            *(f"  {name}" for name in self.weight_copies),
            *self._times(),
            f"kernels         {self.isa}",
            *self._providers(),
            *(f"note            {note}" for note in self.notes),
            *self._ranks(),
            "The step is one graph." if self.holds else "The promise does not hold; see above.",
        ]
        return "\n".join(lines)

    def _regions(self) -> list[str]:
        if not self.regions:
            return []
        wanted = 2 * self.region_kinds
        return [f"inner graphs    {self.inner_graphs}  (wanted {wanted}), of {self.regions} regions"]

    def _providers(self) -> list[str]:
        """Whoever is not ours."""
        others: dict[str, list[str]] = {}
        for operator, provider in self.providers.items():
            if provider != "monograph":
                others.setdefault(provider, []).append(operator)
        return [f"by {name:<13}{', '.join(operators)}" for name, operators in sorted(others.items())]

    def _ranks(self) -> list[str]:
        if self.ranks == 1:
            return []
        lines = [f"ranks           {self.ranks}, each with a gradient of {_mib(self.gradient_bytes)} to sum"]
        if self.shard_ranks == 1:
            lines.append("the base        whole on each rank; ranks of a host share what is mapped")
        for found in self.gathers:
            wanted = len(found.units)
            named = found.units[0] if wanted == 1 else f"{found.units[0]} ... {found.units[-1]}"
            lines.append(
                f"gathers         {found.forward} forward (wanted {wanted}), {found.backward} backward "
                f"(at most {wanted}): {named}, {_mib(found.shard_bytes)} on each rank"
            )
        if self.gathers:
            received = ", ".join(f"{_mib(size)} {where}" for where, size in self.received_bytes.items())
            lines.append(f"received        {received} in a micro-batch")
            lines.append(f"shards          {_mib(self.shard_bytes)} on this rank, of {self.shard_ranks}")
            lines += [f"  whole         {_mib(size)}: {why}" for why, size in self.whole_bytes.items()]
        return lines + [f"  {text}" for text in self.other_ranks]

    def _times(self) -> list[str]:
        if not self.step_seconds:
            return []
        first, *_, last = self.step_seconds
        return [
            f"first step      {first:.1f} s with compilation, last {last:.2f} s; "
            f"compile cache: {self.cache_hits} hits, {self.cache_misses} misses"
        ]


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"


def _causes(found: Sequence[Cause]) -> list[str]:
    again = {cause: f" ({cause.times} times)" if cause.times > 1 else "" for cause in found}
    return [f"  {cause.where}{again[cause]}\n    {cause.reason}" for cause in found]
