"""The sum of gradients over ranks in the tree's order, and what the tree costs one process.

    python -m monograph.bench tree --json

`sum`: 42 million parameters on 2, 3 and 4 ranks of this machine, one thread each, gloo: `sum_over_ranks`
against dist.all_reduce of the same size, in turn, each round from a barrier to the slowest rank's end.
`step`: one process, 1 and 4 micro-batches of a small Llama in NF4, against a step that adds one micro-batch
after the other. A ratio is the peer's time over ours.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from monograph.bench.own_step import CONFIG, LENGTHS
from monograph.bench.report import Report
from monograph.bench.rounds import Paired, paired_rounds
from monograph.distributed import Order, World, join, leave, padded, sum_over_ranks
from monograph.training import TrainStep

PARAMETERS = 42_000_000
# Ranks and virtual shards: one root a rank for 2 and 4, two or three for 3.
SUMS = [(2, 2), (2, 12), (4, 12), (3, 12)]
MICRO_BATCHES = (1, 4)
OURS, PEER = "tree", "all_reduce"


def sum_rounds(world: World, leaves: int, parameters: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each round, by the slowest rank."""
    order = Order.of(leaves, leaves, world.rank, world.size)
    length = padded(parameters + 1, world.size)
    parts = [torch.randn(length) for _ in range(order.roots[world.rank])]
    kept = [part.clone() for part in parts]
    plain = torch.randn(length)

    def tree() -> None:
        sum_over_ranks(parts, length, order, world)

    def all_reduce() -> None:
        dist.all_reduce(plain, group=world.group)

    times: dict[str, list[float]] = {OURS: [], PEER: []}
    for _ in range(rounds + 1):
        for name, work in ((OURS, tree), (PEER, all_reduce)):
            for part, first in zip(parts, kept, strict=True):
                part.copy_(first)  # both write to what they are given
            plain.fill_(1.0)
            world.barrier()
            begin = time.perf_counter()
            work()
            own = (time.perf_counter() - begin) * 1e3
            times[name].append(max(world.gathered(own)))
    return {name: found[1:] for name, found in times.items()}


def run_ranks(ranks: int, leaves: int, parameters: int, rounds: int) -> dict[str, list[float]]:
    """`sum_rounds` in processes of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "monograph.bench.tree", json.dumps([leaves, parameters, rounds])]
    started = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        environment = os.environ | place | {"MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    answers = [process.communicate()[0] for process in started]
    for rank, process in enumerate(started):
        if process.returncode:
            raise RuntimeError(f"rank {rank} of {ranks} ended with {process.returncode}")
    return json.loads(answers[0].splitlines()[-1])


def rank_main(job: str) -> None:
    torch.set_num_threads(1)
    world = join()
    times = sum_rounds(world, *json.loads(job))
    if world.first:
        print(json.dumps(times), flush=True)
    leave(world)


class InOrder(TrainStep):
    """The peer of `step`: one buffer, to which each micro-batch is added."""

    def _accumulated(
        self, batches: Mapping[int, dict[str, torch.Tensor]], targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = self.micro_batch_gradient(0, batches[0], targets)
        for index in range(1, len(batches)):
            total.add_(self.micro_batch_gradient(index, batches[index], targets))
        size = self.state.flat.numel()
        return total[size].clone(), total[:size]


def small_step(kind: type[TrainStep], micro_batches: int) -> Any:
    """A call that makes one step of a small Llama."""
    from peft import LoraConfig
    from transformers import LlamaConfig, LlamaForCausalLM

    import monograph as mg
    from monograph.bench.step_contender import documents
    from monograph.nn import replace_linears
    from monograph.packing import PackedCollator

    torch.manual_seed(0)
    sizes: dict[str, Any] = {name: value for name, value in CONFIG.items() if name != "model_type"}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes))
    model.to(torch.bfloat16)
    replace_linears(model, "nf4", double_quant=True)
    step = kind(mg.add_lora(model, LoraConfig(r=16, target_modules="all-linear")), dynamic=False)
    collate = PackedCollator(max_documents=4)
    batches = [collate(documents(LENGTHS, model.config.vocab_size, seed)) for seed in range(micro_batches)]
    return lambda: step(batches, 1e-4)


def run(arguments: argparse.Namespace, report: Report) -> None:
    rounds = 5 if arguments.quick else 20
    parameters = PARAMETERS // 10 if arguments.quick else PARAMETERS
    summary: dict[str, float] = {}
    for ranks, leaves in SUMS:
        times = run_ranks(ranks, leaves, parameters, rounds)
        ratio = statistics.median(peer / own for own, peer in zip(times[OURS], times[PEER], strict=True))
        case = {"case": "sum", "ranks": ranks, "virtual_shards": leaves, "parameters": parameters}
        case["roots"] = list(Order.of(leaves, leaves, 0, ranks).roots)
        case["load"] = round(os.getloadavg()[0], 1)
        report.case(case, Paired({n: min(t) for n, t in times.items()}, {PEER: ratio}, 0, 0.0), OURS)
        summary[f"sum_ranks_{ranks}_shards_{leaves}"] = ratio
    torch.set_num_threads(1)
    for micro_batches in MICRO_BATCHES:
        works = {OURS: small_step(TrainStep, micro_batches), "in_order": small_step(InOrder, micro_batches)}
        paired = paired_rounds(works, OURS, 10 * rounds)
        report.case({"case": "step", "ranks": 1, "micro_batches": micro_batches}, paired, OURS)
        summary[f"step_micro_batches_{micro_batches}"] = paired.ratio["in_order"]
    report.summary(summary)


if __name__ == "__main__":
    rank_main(sys.argv[1])
