"""The formulas of distributed/plan.py against graphs on fake groups, docs/explain/scale.md against those.

Models have their full width and one or two layers; that a whole model is its layers times a layer is compared
too. All 64, 512 and 4,096 ranks, flat and hybrid, of 8B, 70B and 405B: MONOGRAPH_LONG=1 (.ci/run scale).
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
from collections import Counter
from typing import Any

import pytest
import torch

from monograph.cli.plan_ranks import main
from monograph.distributed.model_sizes import read_sizes
from monograph.distributed.plan import Link, Mesh, Plan, Sizes, Step, make_plan
from monograph.distributed.shard import sharded_units
from monograph.distributed.tree import CHUNK, Order, chunk_length, padded
from monograph.hf.peft.meta_adapter import with_meta_adapter
from monograph.hf.transformers.config import MonographConfig
from monograph.hf.transformers.meta_model import meta_model
from monograph.upstream.torch_names import process_group_named
from support.traced_collectives import (
    peak_of_activations,
    pretended,
    step_collectives,
    sum_collectives,
    untouched_model,
)

ROOT = pathlib.Path(__file__).parents[3]


def _page() -> Any:
    spec = importlib.util.spec_from_file_location("scale_page", ROOT / "tools" / "scale_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGE = _page()
LONG = [
    (name, ranks, shard, mode)
    for name in ("8B", "70B", "405B")
    for ranks in (64, 512, 4096)
    for shard in sorted({ranks, 8, 64})
    for mode in ("whole_step", "graph")
    if mode == "graph" or ranks < 4096 or (name, shard) == ("8B", 4096)  # its tree is a graph of 8,000 nodes
]
SHORT = [
    ("8B", 64, 64, "whole_step"),
    ("70B", 512, 8, "graph"),
    ("405B", 4096, 64, "graph"),
]
MIXTURES = ["Qwen3-235B-A22B", "671B"]
CASES, MIXTURES = (LONG, MIXTURES) if os.environ.get("MONOGRAPH_LONG") else (SHORT, MIXTURES[:1])
LAYERS = {"671B": 4}  # three dense layers and one with experts


def sizes_of(name: str, layers: int) -> Sizes:
    config = PAGE.config_of(name, num_hidden_layers=layers)
    model = meta_model(config, MonographConfig("nf4", double_quant=True))
    return read_sizes(with_meta_adapter(model, 16, "all-linear"))


def by_formula(plan: Plan) -> Counter[tuple[str, int, int, int]]:
    found: Counter[tuple[str, int, int, int]] = Counter()
    for c in plan.collectives:
        if c.what != "targets":  # told outside of graphs
            found[c.operator, c.ranks, c.input, c.output] += c.calls
    return found


def by_graph(calls: Any) -> Counter[tuple[str, int, int, int]]:
    found: Counter[tuple[str, int, int, int]] = Counter()
    for call, times in calls.items():
        found[call.operator, process_group_named(call.group).size(), call.input, call.output] += times
    return found


def compare(name: str, ranks: int, shard: int, mode: str, layers: int) -> None:
    sizes = sizes_of(name, layers)
    plan = make_plan(sizes, Mesh(ranks, shard), Step(512, ranks, whole=mode == "whole_step"))
    with pretended(ranks, shard) as (world, mesh):
        model = untouched_model(PAGE.config_of(name, num_hidden_layers=layers), mesh)
        held = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
        held += sum(b.nbytes for b in model.buffers())
        held += sum(unit.shard.nbytes for unit in sharded_units(model).values() if not unit.shard_holder)
        assert held == plan.memory["shard"]
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) == sizes.trained
        calls, traces = step_collectives(model, world, mode, tokens=512)
        if mode == "graph":
            order = Order.of(ranks, ranks, ranks - 1, ranks)
            calls += sum_collectives(1, padded(sizes.trained + 1, ranks), order, world)
        assert by_graph(calls) == by_formula(plan)
    # The plan has a bound for a layer's backward with its repeated forward; experts need far less.
    bound, least = sizes.working * sizes.float_bytes, 0.8 if name in PAGE.LLAMAS else 0.25
    for traced in traces.values():
        assert traced.backward is not None
        assert least * bound <= peak_of_activations(traced.backward) <= bound


@pytest.mark.parametrize(("name", "ranks", "shard", "mode"), CASES)
def test_collectives_in_graphs_are_those_of_the_formula_to_the_byte(
    name: str, ranks: int, shard: int, mode: str
) -> None:
    compare(name, ranks, shard, mode, layers=1 if ranks > 64 else 2)


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_gathered_as_the_formula_says(name: str) -> None:
    compare(name, 64, 8, "graph", layers=LAYERS.get(name, 1))


@pytest.mark.parametrize("name", ["8B", "70B", "405B", "671B"])
def test_a_whole_model_is_its_layers_times_a_layer(name: str) -> None:
    whole, few = PAGE.sizes_of(name), sizes_of(name, LAYERS.get(name, 2))
    layouts = [Counter(unit.pieces for unit in sizes.units if unit.layer) for sizes in (whole, few)]
    assert layouts[0].keys() == layouts[1].keys()
    assert layouts[0].total() == whole.layers == PAGE.config_of(name).num_hidden_layers
    assert [u.pieces for u in whole.units if not u.layer] == [u.pieces for u in few.units if not u.layer]
    for ranks in (64, 512, 4096):
        rows = [unit.layout(ranks) for unit in whole.units]
        packed = sum(row.tensor_bytes for row in rows)
        assert packed <= sum(row.nbytes for row in rows) <= 1.02 * packed


def test_the_page_is_what_the_formulas_give() -> None:
    text = PAGE.PAGE.read_text()
    assert PAGE.filled(text) == text
    # What its sentences say.
    names = (*PAGE.MODELS, PAGE.ON_ATTENTION)
    held = {(name, ranks): PAGE.plan_of(name, ranks, ranks).held for name in names for ranks in (8, 64)}
    assert held["405B", 8] < 80e9
    assert held["671B", 8] > 80e9 > held[PAGE.ON_ATTENTION, 8]
    for name in names:
        assert held[name, 64] < 1.3 * PAGE.plan_of(name, 4096, 4096).held


def test_seconds_and_bytes_of_a_plan_by_hand() -> None:
    """Two layers of 1000 bytes on 4 ranks, 999 trained numbers, two micro-batches a rank."""
    tensors = {"w": torch.empty(1000, dtype=torch.uint8, device="meta")}
    unit = _unit("layer", tensors)
    sizes = Sizes((unit, unit), 8, 999, 2, 16, 32, 10, 2000, 2)
    plan = make_plan(sizes, Mesh(8, 4), Step(tokens=5, micro_batches=16, whole=True))
    assert plan.memory["shard"] == 2 * 256 + 8  # 250 bytes a rank, to a multiple of 16
    assert plan.memory["gathered"] == 2 * 4 * 256
    assert plan.memory["layer inputs"] == 2 * 5 * 16 * 2
    base = sum(c.moved for c in plan.gathers)
    assert (
        base == 2 * 2 * 2 * 3 * 256
    )  # layers, forward and backward, micro-batches, the shards of three others
    assert plan.moved - base == 2 * 7 * 500 + 2 * 24 * 7 // 8  # 1,000 floats on 8 ranks twice, and the counts
    assert plan.flops == 6 * 2000 * 5 * 2
    waits = 2 * 2 * 2 * 3 + 2 * 7 + 2 * 7
    assert plan.seconds(Link(1000.0, 0.5)) == pytest.approx(plan.moved / 1000 + 0.5 * waits)


def _unit(name: str, tensors: dict[str, torch.Tensor]) -> Any:
    from monograph.distributed.layer_bytes import Layout
    from monograph.distributed.plan import Unit

    return Unit(name, Layout.of(tensors, 1).pieces, gathers=2, layer=True)


def test_chunks_of_the_sum_grow_with_the_ranks() -> None:
    """A ring of 4,096 ranks would wait for thousands of messages of a kilobyte."""
    assert chunk_length(2) == chunk_length(16) == CHUNK
    for ranks in (3, 64, 512, 4096):
        assert chunk_length(ranks) % ranks == 0
        assert chunk_length(ranks) // ranks >= 2**16


def test_the_command(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    PAGE.config_of("8B", num_hidden_layers=2).save_pretrained(tmp_path)
    arguments = [str(tmp_path / "config.json"), "--ranks", "64", "--shard-size", "8", "--bandwidth", "100"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    plan = make_plan(sizes_of("8B", 2), Mesh(64, 8), Step(4096, 64))
    assert found["memory_bytes"] == dict(plan.memory)
    assert found["moved_bytes"] == plan.moved
    assert found["seconds_by_gigabits"] == {"100": plan.seconds(Link(12.5e9, 1e-5))}
    assert main(arguments) == 0
    assert "64 ranks, 8 replicas of 8" in capsys.readouterr().out
    assert main([str(tmp_path), "--ranks", "64", "--shard-size", "7"]) == 2
    assert "shard size is 7, wanted a divisor of 64" in capsys.readouterr().err
    assert main([str(tmp_path / "none"), "--ranks", "64"]) == 2
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "fp8"}})
    )
    assert main([str(tmp_path), "--ranks", "64"]) == 2
    assert "is quantised by 'fp8'; wanted --format" in capsys.readouterr().err
