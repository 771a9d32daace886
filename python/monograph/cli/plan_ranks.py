"""What a run would hold and move on a number of ranks, by formula: nothing is loaded and nothing is run.

    python -m monograph.distributed Llama-3.1-405B --ranks 512 --shard-size 64
    python -m monograph.distributed config.json --ranks 8 --tokens 8192 --bandwidth 100 400 --json

docs/explain/scale.md explains the figures and has tables for models of 8 to 671 billion parameters.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from monograph.distributed.plan import Link, Mesh, Plan, Sizes, Step, make_plan

GIGABIT = 1e9 / 8


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    shard = options.shard_size or options.ranks
    batches = options.micro_batches or options.ranks
    try:
        mesh = Mesh(options.ranks, shard, options.expert_parallel_size)
        sizes = _sizes(options)
        plan = make_plan(sizes, mesh, Step(options.tokens, batches, options.virtual_shards))
    except (OSError, ValueError) as error:
        print(f"monograph.distributed: {error}", file=sys.stderr)
        return 2
    inside = None if options.shard_bandwidth is None else _link(options.shard_bandwidth, options.latency)
    seconds = {f"{rate:g}": plan.seconds(_link(rate, options.latency), inside) for rate in options.bandwidth}
    compute = plan.flops / (options.tflops * 1e12)
    show = _as_json if options.json else _as_text
    print(show(sizes, plan, seconds, compute))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m monograph.distributed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", help="a folder with a config.json of transformers, or the file")
    add("--ranks", type=int, required=True, help="processes")
    add("--shard-size", type=int, default=0, help="ranks that hold one replica together; default: all")
    add("--expert-parallel-size", type=int, default=1, help="ranks over which experts are spread; default 1")
    add("--tokens", type=int, default=4096, help="of a micro-batch; default 4096")
    add("--micro-batches", type=int, default=0, help="of a step, over all ranks; default: one for each rank")
    add("--virtual-shards", type=int, default=0, help="leaves of the tree; default: the micro-batches")
    add("--format", default=None, help="of the base: nf4 (default), mxfp4, ... or none")
    add("--no-double-quant", action="store_true", help="float32 scales for nf4 and fp4")
    add("--lora-r", type=int, default=16, help="rank of the adapter; default 16")
    add("--lora-target", nargs="+", default=["all-linear"], help="modules; default all-linear")
    add("--bandwidth", type=float, nargs="+", default=[25, 100, 400], help="of a rank, Gbit/s")
    add("--shard-bandwidth", type=float, help="among the ranks of a replica, Gbit/s; default: as --bandwidth")
    add("--latency", type=float, default=10, help="of one hop of a ring, microseconds; default 10")
    add("--tflops", type=float, default=400, help="that a rank computes a second; default 400")
    add("--json", action="store_true", help="one JSON object")
    return parser


def _link(gigabits: float, microseconds: float) -> Link:
    return Link(gigabits * GIGABIT, microseconds * 1e-6)


def _sizes(options: argparse.Namespace) -> Sizes:
    from monograph.distributed.model_sizes import read_sizes
    from monograph.hf.peft.meta_adapter import with_meta_adapter
    from monograph.hf.transformers.planned_model import planned_model

    targets: Any = options.lora_target
    model = planned_model(options.model, options.format, double_quant=not options.no_double_quant)
    return read_sizes(with_meta_adapter(model, options.lora_r, targets[0] if len(targets) == 1 else targets))


def _as_json(sizes: Sizes, plan: Plan, seconds: dict[str, float], compute: float) -> str:
    return json.dumps(
        {
            "schema_version": 1,
            "ranks": plan.mesh.ranks,
            "shard_size": plan.mesh.shard,
            "expert_parallel_size": plan.mesh.experts,
            "base_bytes": sizes.base_bytes,
            "trained": sizes.trained,
            "memory_bytes": dict(plan.memory),
            "held_bytes": plan.held,
            "moved_bytes": plan.moved,
            "collectives": [vars(c) | {"moved": c.moved} for c in plan.collectives],
            "seconds_by_gigabits": seconds,
            "seconds_computing": compute,
        }
    )


def _as_text(sizes: Sizes, plan: Plan, seconds: dict[str, float], compute: float) -> str:
    gathers = sum(c.moved for c in plan.gathers)
    routed = sum(c.moved for c in plan.collectives if c.operator == "exchange")
    lines = [
        f"{sizes.layers} layers, {_gb(sizes.base_bytes)} GB of base, {sizes.trained / 1e6:.1f} M trained",
        f"{plan.mesh.ranks} ranks, {plan.mesh.ranks // plan.mesh.shard} replicas of {plan.mesh.shard}",
        "",
        "a rank holds, GB",
        *(f"  {name:14}{_gb(size):>10}" for name, size in plan.memory.items()),
        f"  {'together':14}{_gb(plan.held):>10}",
        "",
        f"a step of {plan.rounds} micro-batch(es) a rank moves, GB of a rank",
        f"  {'base':14}{_gb(gathers):>10}   {sum(c.calls for c in plan.gathers)} gathers",
        f"  {'gradient':14}{_gb(plan.moved - gathers - routed):>10}",
        *_routed_lines(sizes, plan, routed),
        "",
        "seconds, without overlap",
        *(f"  {rate + ' Gbit/s':14}{took:>10.2f}" for rate, took in seconds.items()),
        f"  {'computing':14}{compute:>10.2f}",
    ]
    return "\n".join(lines)


def _routed_lines(sizes: Sizes, plan: Plan, routed: int) -> list[str]:
    """What spread experts send: with even routes, and each slot alone."""
    ranks, experts = plan.mesh.experts, sizes.experts
    if experts is None or ranks == 1:
        return []
    token, alone = experts.sent_for_a_token(ranks), experts.each_slot_alone(ranks)
    return [
        f"  {'experts':14}{_gb(routed):>10}   {token / 1e6:.2f} MB a token with even routes, at most "
        f"{alone / 1e6:.2f} MB if each slot went alone"
    ]


def _gb(size: int) -> str:
    return f"{size / 1e9:,.2f}"
