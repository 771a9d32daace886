"""What runs on ranks for test_shard.py: sharded models against whole ones without any of our sharding."""

from __future__ import annotations

import copy
import itertools
import os
import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from peft import LoraConfig
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import monograph as mg
from monograph.distributed import World, shard_group_of, sharded_layer
from monograph.distributed.shard import sharded_units
from monograph.distributed.shard_placeholder import ShardPlaceholder
from monograph.distributed.sharded_layer import ShardedLayer
from monograph.nn import QuantLinear, replace_linears
from monograph.ops.formats import ABSMAX_FORMATS, FORMATS
from monograph.training import TrainStep, forward_loss
from monograph.training.regions import TRACES, forget, make_regions
from monograph.training.regions.outer_graph import partition
from monograph.upstream.torch_names import aot_autograd, make_boxed_func
from support import recurrent_models
from support.tiny_models import tiny_llama

VOCAB = 320
# Rows and columns that fill no whole block: 192 and 328.
ODD: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 328,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def with_lora(
    model: Any, checkpointing: bool = False, dropout: float = 0.0, dora: bool = False, **options: Any
) -> Any:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.manual_seed(1)
    config = LoraConfig(
        r=4, target_modules="all-linear", lora_dropout=dropout, use_dora=dora, init_lora_weights=False
    )
    return mg.add_lora(model, config, **options)


def llama(
    sizes: Any = SMALL,
    layers: int = 2,
    tied: bool = False,
    nested: bool = True,
    every_format: bool = False,
    **options: Any,
) -> Any:
    """every_format: the linears of a layer have the formats one after the other."""
    model = tiny_llama(
        dtype=torch.bfloat16,
        **sizes,
        num_hidden_layers=layers,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        attention_bias=every_format,
    )
    if not every_format:
        replace_linears(model, "nf4", double_quant=nested)
        return with_lora(model, **options)
    linears = [(name, m) for name, m in model.model.named_modules() if type(m) is nn.Linear]
    for (name, linear), format in zip(linears, itertools.cycle(FORMATS), strict=False):
        double = nested and format in ABSMAX_FORMATS
        model.model.set_submodule(name, QuantLinear.from_linear(linear, format, double_quant=double))
    found = {m.format.name for m in model.modules() if isinstance(m, QuantLinear)}
    assert found == set(FORMATS)
    return with_lora(model, **options)


def gemma3(**options: Any) -> Any:
    """Windows and full attention, tied embeddings, a soft-cap."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        **SMALL,
        num_hidden_layers=2,
        vocab_size=VOCAB,
        head_dim=16,
        sliding_window=8,
        final_logit_softcapping=5.0,
        layer_types=["sliding_attention", "full_attention"],
    )
    model: Any = Gemma3ForCausalLM(config)
    model.to(torch.bfloat16)
    replace_linears(model, "nf4", double_quant=True)
    return with_lora(model, **options)


def experts(folder: str | pathlib.Path, family: str, **options: Any) -> Any:
    format = "mxfp4" if family == "gpt_oss" else "nf4"
    model = mg.from_pretrained(f"{folder}/{family}", mg.MonographConfig(format))
    return with_lora(model, experts=True, **options)


def recurrent(**options: Any) -> Any:
    model = recurrent_models.build("qwen3_5", dtype=torch.bfloat16)
    replace_linears(model, "nf4")
    return with_lora(model, **options)


def batch(seed: int = 0, rows: int = 2, tokens: int = 12, vocab: int = 64) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (rows, tokens), generator=drawn)
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def same_bits(got: Any, want: Any) -> bool:
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (got, want)))


def found_by(model: Any) -> dict[str, Any]:
    """Loss and all gradients in training, logits in evaluation, all in eager mode."""
    model.train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    loss = forward_loss(model, batch())
    found = {"loss": loss.detach()}
    found |= dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))
    # As a trainer calls it: the head is a module, and its gradient goes through it.
    loss = model(**batch(1), use_cache=False).loss
    found |= {"loss of the model": loss.detach()}
    gradients = torch.autograd.grad(loss, list(trained.values()))
    found |= {f"{name} by the model": g for name, g in zip(trained, gradients, strict=True)}
    model.eval()
    with torch.no_grad():
        found["logits"] = model(**batch(2)).logits
        with model.disable_adapter():
            found["logits without adapters"] = model(**batch(2)).logits
    return found


def check_eager(world: World | DeviceMesh, model: Any) -> Any:
    want = found_by(model)
    assert want["loss"].isfinite()
    assert any(name.endswith("weight") and g.any() for name, g in want.items())
    mg.shard(model, world)
    check_cut(model, world)
    got = found_by(model)
    assert [name for name in want if not same_bits(got[name], want[name])] == []
    return model


def check_cut(model: Any, world: World | DeviceMesh) -> None:
    """Nothing frozen is whole but what is small."""
    group = shard_group_of(model)
    units = [m for m in model.modules() if isinstance(m, ShardedLayer)]
    whole = [
        (name, p)
        for name, p in model.named_parameters()
        if not p.requires_grad and not isinstance(p, ShardPlaceholder)
    ]
    assert all(p.numel() <= 192 for _, p in whole), whole
    held = sum(unit.shard.numel() for unit in units if not unit.shard_holder)
    wanted = sum(unit.shard_spec.layout.bytes_per_rank for unit in units if not unit.shard_holder)
    assert held == wanted
    assert group is not None
    assert all(unit.shard_spec.group.size == group.size for unit in units)


def formats_and_models(world: World, folder: str | pathlib.Path) -> str:
    """Every format in every sense, families of models, in eager mode with and without checkpoints."""
    check_eager(world, llama(ODD, every_format=True, nested=False, layers=1, checkpointing=True))
    check_eager(world, llama(ODD, every_format=True, layers=2))
    check_eager(world, llama(tied=True, layers=1, dora=True))
    check_eager(world, gemma3(checkpointing=True))
    check_eager(world, experts(folder, "qwen3_moe"))
    check_eager(world, experts(folder, "gpt_oss", checkpointing=True))
    model = check_eager(world, recurrent())
    ids = batch()["input_ids"]
    got = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(got, recurrent().generate(ids, max_new_tokens=4, do_sample=False))
    counted_in_eager(world)
    every_byte(world)
    refused(world)
    return "done"


def counted_in_eager(world: World) -> None:
    """A layer gathers once forward and once backward, a head that is called too; at most two rows exist."""
    for checkpointing in (False, True):
        model = mg.shard(llama(layers=3, checkpointing=checkpointing), world)
        model.train()
        alive = Alive()
        count: list[Any] = []

        def gather(unit: Any, alive: Any = alive, count: Any = count) -> Any:
            count.append(unit)
            row = alive.gather(unit.shard, unit.shard_spec.group.size, unit.shard_spec.group.name)
            return torch.ops._c10d_functional.wait_tensor(row).view(-1)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sharded_layer, "gathered_row", gather)
            found = []
            for called in (False, True):
                made = model(**batch(), use_cache=False).loss if called else forward_loss(model, batch())
                forward = len(count)
                made.backward()
                found.append((forward, len(count) - forward))
                count.clear()
        assert found == [(5, 3), (5, 4)]
        assert alive.most <= 2


def every_byte(world: World) -> None:
    """All patterns of a bf16, NaN of every kind too, and all bytes: what is gathered is what was cut."""
    model = llama(layers=1)
    embedding = model.get_base_model().model.embed_tokens
    patterns = torch.arange(VOCAB * 64, dtype=torch.int32) * 5
    with torch.no_grad():
        embedding.weight.view(torch.int16).view(-1).copy_(patterns.to(torch.int16))
    want = embedding.weight.detach().clone().view(torch.int16)
    assert torch.isnan(embedding.weight).any()
    mg.shard(model, world)
    got = embedding(torch.arange(VOCAB)).view(torch.int16)
    assert torch.equal(got, want)


def raises(kind: type[Exception], words: list[str], work: Callable[[], object]) -> None:
    with pytest.raises(kind, match=".*".join(re.escape(word) for word in words)):
        work()


def refused(world: World) -> None:
    whole = llama(layers=1)
    model: Any = mg.shard(copy.deepcopy(whole), world)
    layer = model.get_base_model().model.layers[0]
    values = layer.self_attn.q_proj.base_layer.values
    where = "model.layers.0.self_attn.q_proj.base_layer.values is sharded over 2 ranks"
    for work in (
        lambda: values + 1,
        lambda: values.clone(),
        lambda: values.data,
        lambda: torch.cat([values, values]),
        lambda: values.requires_grad_(True),
        lambda: layer.self_attn.q_proj.base_layer.dequantize(),
        lambda: model.merge_adapter(),
    ):
        raises(RuntimeError, [where, "wanted monograph.unsharded(model)"], work)
    raises(RuntimeError, ["is sharded over 2 ranks"], lambda: model.to(torch.float32))
    assert model.to("cpu") is model
    assert set(model.state_dict()) - set(whole.state_dict()) == {
        f"{path}.shard" for path in sharded_units(model)
    }
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # the adapter
    raises(ValueError, ["sharded already"], lambda: mg.shard(model, world))
    regions: Any = make_regions(copy.deepcopy(whole))
    raises(ValueError, ["has regions"], lambda: mg.shard(regions, world))
    shared = copy.deepcopy(whole)
    layers = shared.get_base_model().model.layers
    layers.append(copy.deepcopy(layers[0]))
    layers[1].input_layernorm.weight = layers[0].input_layernorm.weight
    raises(ValueError, ["layers.1.input_layernorm.weight is a parameter of"], lambda: mg.shard(shared, world))
    other = llama(layers=1, nested=world.rank == 0)
    raises(ValueError, ["base_layer.absmax is", "on rank 0 and", "on rank 1"], lambda: mg.shard(other, world))
    # A copy and what was copied compute alike.
    twin = copy.deepcopy(model)
    with torch.no_grad():
        assert same_bits(twin(**batch()).logits, model(**batch()).logits)
        assert same_bits(twin(**batch()).logits, whole(**batch()).logits)


class Graphs:
    """A backend that runs graphs as `outer_graph` does, and keeps them."""

    def __init__(self) -> None:
        self.forward: list[Any] = []
        self.backward: list[Any] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        def kept(found: Any) -> Any:
            def compiler(made: Any, _: Any) -> Any:
                found.append(made)
                return make_boxed_func(made.forward)

            return compiler

        return aot_autograd(
            fw_compiler=kept(self.forward),
            bw_compiler=kept(self.backward),
            inference_compiler=kept(self.forward),
            partition_fn=partition,
            keep_inference_input_mutations=True,
        )(graph, inputs)


def gathers(graph: Any) -> Any:
    return [n for n in graph.graph.nodes if "all_gather_into_tensor" in str(n.target)]


def results(graph: Any) -> Any:
    return [n for n in graph.graph.output_node().args[0] if hasattr(n, "meta")]


class Alive:
    """How many gathered rows exist at a time, counted where graphs gather."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.most = 0

    def watch(self, graph: Any) -> None:
        for node in gathers(graph):
            node.target = self.gather
        graph.recompile()

    def gather(self, shard: Any, size: Any, name: str) -> Any:
        row = torch.ops._c10d_functional.all_gather_into_tensor(shard, size, name)
        self.rows = [r for r in self.rows if not r.expired()]
        self.rows.append(StorageWeakRef(row.untyped_storage()))
        self.most = max(self.most, len(self.rows))
        return row


def check_step(world: World | DeviceMesh, mode: str, lengths: int = 8, **options: Any) -> None:
    """A sharded step as one graph against a whole one in eager mode: bits, graphs, gathers, what is kept."""
    torch._dynamo.reset()
    counters.clear()
    forget()
    eager = TrainStep(llama(dropout=0.1, **options), mode="eager", seed=3)
    graphs = Graphs()
    model = mg.shard(llama(dropout=0.1, **options), world)
    units = [m for m in model.modules() if isinstance(m, ShardedLayer)]
    step = TrainStep(model, mode=mode, seed=3, backend=graphs)
    for number in range(lengths):
        data = batch(number, tokens=10 + 3 * number)
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            got = step([data], 1e-2)
        want = eager([data], 1e-2)
        assert got.loss.item() == want.loss.item()
        assert same_bits(step.state.flat, eager.state.flat)
        assert same_bits(step.state.exp_avg, eager.state.exp_avg)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    check_regions(units)
    check_outer(graphs, units)
    alive = Alive()
    for graph in (*graphs.forward, *graphs.backward):
        alive.watch(graph)
    for traced in TRACES.by_number.values():
        alive.watch(traced.forward)
        alive.watch(traced.backward)
    data = batch(77)
    assert step([data], 1e-2).loss.item() == eager([data], 1e-2).loss.item()
    assert 1 <= alive.most <= 2
    data = batch(78)
    assert step.evaluate(data)[0].item() == eager.evaluate(data)[0].item()


def check_regions(units: Any) -> None:
    """One gather in the forward and one in the backward of each kind of layer; nothing of it is kept, and no
    node of either graph is a float tensor of a weight's size."""
    weights = {
        m.in_features * m.out_features for unit in units for m in unit.modules() if isinstance(m, QuantLinear)
    }
    assert TRACES.signatures == 1
    for traced in TRACES.by_number.values():
        assert len(gathers(traced.forward)) == len(gathers(traced.backward)) == 1
        assert "shard" in traced.read
        assert not [n for n in results(traced.forward)[1:] if n.meta["val"].dtype == torch.uint8]
        assert traced.backward is not None
        for node in (*traced.forward.graph.nodes, *traced.backward.graph.nodes):
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                lengths = [n for n in value.shape if isinstance(n, torch.SymInt)]
                assert lengths or value.numel() not in weights, node


def check_outer(graphs: Any, units: Any) -> None:
    """The embedding and the head are gathered once each; what backward gets is neither bytes nor a float
    tensor of the head's size."""
    (forward,) = graphs.forward
    assert len(units) == 4
    assert len(gathers(forward)) == 2
    for backward in graphs.backward:
        assert not gathers(backward)
    kept = [node.meta["val"] for node in results(forward)]
    for value in (value for value in kept if isinstance(value, torch.Tensor)):
        assert value.dtype != torch.uint8
        assert tuple(value.shape) != (VOCAB, 64)


def check_flat(world: World, mode: str, checkpointing: Any) -> None:
    """The flat graphs of Inductor's modes, run as they are: a layer's gather is repeated in backward, with
    checkpoints or without; what backward gets of bytes are local shards."""
    torch._dynamo.reset()
    counters.clear()
    eager = TrainStep(llama(checkpointing=checkpointing), mode="eager")
    graphs = Graphs()
    model = mg.shard(llama(checkpointing=checkpointing), world)
    step = TrainStep(model, mode=mode, backend=graphs)
    for number in range(2):
        data = batch(number, tokens=10 + 3 * number)
        assert step([data], 1e-2).loss.item() == eager([data], 1e-2).loss.item()
    assert same_bits(step.state.flat, eager.state.flat)
    assert not counters["graph_break"]
    forward, backward = (sum(len(gathers(g)) for g in found) for found in (graphs.forward, graphs.backward))
    wanted = {"inductor": (4, 2), "inductor_whole_step": (6, 0), "per_layer": (2, 2)}
    assert (forward, backward) == wanted[mode]
    for graph in graphs.forward:
        kept = [n for n in results(graph) if isinstance(n.meta["val"], torch.Tensor)]
        assert all(n.op == "placeholder" for n in kept if n.meta["val"].dtype == torch.uint8)


def graphs_of_two(world: World) -> str:
    check_step(world, "graph", checkpointing=True)
    check_step(world, "graph", lengths=2, tied=True)
    check_step(world, "whole_step", lengths=3, tied=True, checkpointing=True)
    return "done"


def flat_graphs(world: World) -> str:
    check_flat(world, "inductor", False)
    check_flat(world, "inductor_whole_step", True)
    check_flat(world, "per_layer", False)
    return "done"


def inductor(world: World, mode: str, checkpointing: bool) -> str:
    """Inductor against Inductor, which rounds otherwise than eager mode; a micro-batch on each rank."""
    found = []
    for cut in (False, True):
        torch._dynamo.reset()
        counters.clear()
        model = llama(layers=1, checkpointing=checkpointing)
        step = TrainStep(mg.shard(model, world) if cut else model, mode=mode, world=world)
        losses = []
        for number in range(2):
            rows = [batch(10 * number + place, tokens=10 + number) for place in range(world.size)]
            losses.append(step(rows, 1e-2).loss.item())
        found.append((losses, step.state.flat))
        assert not counters["graph_break"]
    (losses, flat), (sharded_losses, sharded_flat) = found
    assert losses == sharded_losses
    assert same_bits(sharded_flat, flat)
    return "done"


def odd_ranks(world: World, folder: str | pathlib.Path) -> str:
    """Three ranks: pieces lie across boundaries and the last rank has padding."""
    check_eager(world, llama(ODD, every_format=True, layers=1))
    check_eager(world, experts(folder, "qwen3_moe", checkpointing=True))
    return "done"


def write_in_one_replica(world: World, model: Any) -> None:
    with mg.unsharded(model):
        if world.rank > 1:
            model.get_base_model().model.layers[0].input_layernorm.weight.data.add_(1)


def four_ranks(world: World) -> str:
    """One replica over four ranks; two over two ranks each."""
    from torch.distributed.device_mesh import init_device_mesh

    check_eager(world, llama(ODD, every_format=True, layers=1))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = check_eager(mesh, llama(ODD, layers=1))
    group = shard_group_of(model)
    assert group is not None
    assert (group.rank, group.size) == (world.rank % 2, 2)
    raises(RuntimeError, ["written on ranks 2, 3 of 4"], lambda: write_in_one_replica(world, model))
    if os.environ.get("MONOGRAPH_LONG"):
        check_step(mesh, "graph", lengths=2)
    bad = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    raises(ValueError, ["('x', 'y')", "('replicate', 'shard')"], lambda: mg.shard(llama(layers=1), bad))
    return "done"
