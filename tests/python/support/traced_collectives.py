"""Collectives of a sharded model's step, read from its graphs on a pretended group of many ranks.

The model is the real one: transformers' classes at full width, packed, with LoRA, cut by `monograph.shard`,
stepped by TrainStep. Its memory is never touched: pages that nobody writes cost nothing, and graphs are
traced, not run. They are walked with all that they contain: an operator of a layer counts as
the graphs behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from peft import LoraConfig
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import monograph as mg
from monograph.distributed import World, shard
from monograph.distributed.tree import Order, sum_over_ranks
from monograph.hf.transformers.meta_model import meta_model
from monograph.training import TrainStep
from monograph.training.regions.outer_graph import partition
from monograph.training.regions.registry import Called, traced_for
from monograph.training.regions.trace import Traced


class Call(NamedTuple):
    operator: str
    group: str
    input: int  # bytes
    output: int


class _Counted(Exception):
    """Raised in place of a run."""


@contextmanager
def pretended(ranks: int, shard_size: int) -> Iterator[tuple[World, Any]]:
    """The last of `ranks` ranks that do not exist, and a mesh of them."""
    dist.init_process_group("fake", store=FakeStore(), rank=ranks - 1, world_size=ranks)
    try:
        world = World(ranks - 1, ranks, 0, dist.group.WORLD)
        if shard_size == ranks:
            yield world, world
        else:
            names = ("replicate", "shard")
            yield world, init_device_mesh("cpu", (ranks // shard_size, shard_size), mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def untouched_model(config: Any, mesh: Any, **lora: Any) -> Any:
    """A model of NF4, double-quantised, with LoRA of rank 16 on all linear layers, cut along `mesh`."""
    config._attn_implementation = "monograph"
    config.use_cache = False
    base = meta_model(config, mg.MonographConfig("nf4", double_quant=True)).to_empty(device="cpu")
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = mg.add_lora(base, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"), **lora)
    return shard(model, mesh)


def step_collectives(
    model: Any, world: World, mode: str, tokens: int = 512
) -> tuple[Counter[Call], dict[str, Traced]]:
    """Those of the graphs of a step with one micro-batch for each rank, and the traces of its layers.

    mode: "whole_step", or "graph", where the sum over ranks is outside.
    """
    found: Counter[Call] = Counter()
    layers: dict[str, Traced] = {}

    def counted(graph: torch.fx.GraphModule, last: bool) -> Any:
        def run(arguments: Any) -> Any:
            found.update(
                _of_graph(graph, layers)
            )  # what cannot be a region raises, and is traced again as it is
            if last:
                raise _Counted
            arguments.clear()
            results: Any = graph.graph.output_node().args[0]
            return [_untouched(one) for one in results]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    backend = aot_autograd(
        fw_compiler=lambda graph, _: counted(graph, last=mode == "whole_step"),
        bw_compiler=lambda graph, _: counted(graph, last=True),
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    step = TrainStep(model, mode=mode, dynamic=False, backend=backend, world=world)
    ids = torch.zeros(1, tokens, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids.clone(), "position_ids": torch.arange(tokens)[None]}
    try:
        step([batch] * world.size, learning_rate=1e-4)  # a fake group gives each rank what this one has
    except _Counted:
        return found, layers
    raise AssertionError("the graph was run")


def _untouched(node: Any) -> Any:
    value = _value(node)
    return torch.empty_like(value, device="cpu") if isinstance(value, torch.Tensor) else value


class _Collectives(TorchDispatchMode):
    """Of operators as they are called, here on meta tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Call] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if func.namespace == "_c10d_functional" and "wait" not in func.name():
            self.found[_call(func, args, args[0], result)] += 1
        return result


def sum_collectives(parts: int, length: int, order: Order, world: World) -> Counter[Call]:
    """Those of the sum over ranks, called as TrainStep calls it outside of a graph."""
    with _Collectives() as seen:
        sum_over_ranks([torch.empty(length, device="meta") for _ in range(parts)], length, order, world)
    return seen.found


def _call(func: Any, args: Any, given: torch.Tensor, result: torch.Tensor) -> Call:
    name = func.name().removeprefix("_c10d_functional::")
    for suffix in ("_out", "_into_tensor", "_single", "_"):
        name = name.removesuffix(suffix)
    return Call(name, args[-1], given.nbytes, result.nbytes)


def _of_graph(graph: torch.fx.GraphModule, layers: dict[str, Traced]) -> Counter[Call]:
    """layers: the traces behind the operators of forward, for those of backward."""
    found: Counter[Call] = Counter()
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is torch.ops.monograph.region.default:
            layers[node.args[0]] = traced = _traced(node)
            found += _of_graph(traced.forward, layers)
        elif node.target is torch.ops.monograph.region_backward.default:
            backward = layers[node.args[0]].backward
            assert backward is not None
            found += _of_graph(backward, layers)
        elif getattr(node.target, "namespace", "") == "_c10d_functional" and "wait" not in node.name:
            found[_call(node.target, node.args, node.args[0].meta["val"], node.meta["val"])] += 1
    return found


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, torch.fx.Node) else argument


def _traced(region: torch.fx.Node) -> Traced:
    arguments: Any = region.args
    layer, call, trained, mode, autocast, hidden, seed, inputs, _ = arguments
    activations = [_value(hidden), *(_value(one) for one in inputs)]
    return traced_for(Called(layer, call, trained, mode, autocast, activations, _value(seed)))[0]


def peak_of_activations(graph: torch.fx.GraphModule) -> float:
    """Bytes a token of what a graph makes with a size that depends on tokens, at their peak, if each is freed
    behind its last reader."""
    nodes = list(graph.graph.nodes)
    *rows, _ = nodes[0].meta["val"].shape  # the hidden states
    tokens = prod(size if isinstance(size, int) else size.node.hint for size in rows)
    storages: dict[int, int] = {}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    given: set[int] = set()
    for place, node in enumerate(nodes):
        for one in (node, *node.all_input_nodes):
            for tensor in tree_leaves(one.meta.get("val")):
                if not isinstance(tensor, torch.Tensor):
                    continue
                storage = tensor.untyped_storage()
                key = storage._cdata
                size = storage.nbytes()
                if node.op == "placeholder" or isinstance(size, int):
                    given.add(key)
                storages[key] = size if isinstance(size, int) else size.node.hint
                first.setdefault(key, place)
                last[key] = place
    changes: Counter[int] = Counter()
    for key in storages.keys() - given:
        changes[first[key]] += storages[key]
        changes[last[key] + 1] -= storages[key]
    peak = alive = 0
    for place in sorted(changes):
        alive += changes[place]
        peak = max(peak, alive)
    return peak / tokens
