"""TrainStep over spread experts: losses, state and adapter file of the run without them, on 1 to 4 ranks."""

from __future__ import annotations

import hashlib
import pathlib
import re
import tempfile

import pytest
import torch
from peft import LoraConfig

import monograph as mg
from monograph.distributed import alone
from monograph.distributed.expert_parallel import expert_group_of, expert_layers
from monograph.distributed.expert_routes import owned
from monograph.distributed.file_ranges import RangeReader
from monograph.nn import PackedExperts
from monograph.training import TrainStep
from monograph.training.regions import TRACES
from monograph.training.traced_exchanges import exchanges_in
from monograph.upstream.torch_names import parameters_of
from support.run_ranks import message, run_ranks, smaller_worlds
from support.tiny_moe import save_tiny

# No number of ranks but 2 divides the experts of gpt-oss; 4 ranks own one or two of them.
FAMILIES = {"qwen3_moe": ("nf4", {"num_experts": 8}), "gpt_oss": ("mxfp4", {"num_local_experts": 6})}
MICRO_BATCHES = (5, 2, 4)  # of each step: ranks with one more, ranks without any, one each on four
WAYS = ("losses", "state", "file")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("experts")
    for family, (_, sizes) in FAMILIES.items():
        save_tiny(made / "dense" / family, family, dtype=torch.bfloat16, **sizes)
        mg.from_pretrained(made / "dense" / family, config_of(family), dtype=torch.bfloat16).save_pretrained(
            made / family
        )
    return str(made)


def config_of(family):
    format, _ = FAMILIES[family]
    return mg.MonographConfig(format, **({"double_quant": True} if format == "nf4" else {}))


def build(folder, family):
    model = mg.from_pretrained(f"{folder}/{family}", dtype=torch.bfloat16)
    torch.manual_seed(3)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    model = mg.add_lora(model, lora, experts=True)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.mul_(0.1)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def batches():
    generator = torch.Generator().manual_seed(0)
    for count in MICRO_BATCHES:
        made = []
        for number in range(count):
            ids = torch.randint(0, 64, (2, 9 + 3 * number), generator=generator)
            made.append({"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)})
        yield made


def trained(folder, family, mode, world, how, in_order=False):
    """how(model) is between the adapter and the step. in_order: no sum of squares is near enough."""
    model = build(folder, family)
    how(model)
    step = TrainStep(model, mode=mode, world=world)
    if in_order:
        step.state.spread_norm.wider = 1e9
    losses = [[float(t).hex() for t in (r.loss, r.grad_norm)] for r in (step(m, 1e-2) for m in batches())]
    held = next(batches())[:3]
    losses.append([float(step.evaluate_all(held)[0]).hex()])
    state, found = hashlib.sha256(), step.state_dict()
    if world.first:
        for name in sorted(found):
            state.update(f"{name} {list(found[name].shape)}".encode())
            state.update(found[name].numpy().tobytes())
    file = ""
    with mg.whole_adapter(model):
        if world.first:
            with tempfile.TemporaryDirectory() as out:
                model.save_pretrained(out)
                file = hashlib.sha256(pathlib.Path(out, "adapter_model.safetensors").read_bytes()).hexdigest()
    return dict(zip(WAYS, (losses, state.hexdigest(), file), strict=True)), model, step


def compared(world, folder, family, mode, sizes, adapter=True):
    """Steps on groups of these sizes; what rank 0 found different from the run without spread experts."""
    wrong, whole, held = [], None, 0
    for own in smaller_worlds(world, [1, *sizes]):
        if own.size == 1:
            whole, _, step = trained(folder, family, mode, alone(), lambda model: None)
            held = step.state.flat.numel()
            continue
        in_order = adapter and own.size == 3
        found, model, step = trained(
            folder, family, mode, own, lambda model, w=own: spread(model, w, adapter), in_order
        )
        if adapter:
            assert step.state.spread_norm.in_order == (len(MICRO_BATCHES) if in_order else 0)
        sent = expert_group_of(model).sent
        assert sent.all_bytes > 0
        assert (sent.factors == 0) == adapter
        if own.first:
            check_held(model, step, held, own.size, adapter)
        if own.first:
            wrong += [(own.size, name) for name in WAYS if found[name] != whole[name]]
    return wrong


def check_held(model, step, whole, ranks, adapter):
    """Parameters, moments and their sum of gradients: of the experts of this rank alone."""
    of_experts = sum(
        numel for name, numel in zip(step.state.names, step.state.sizes, strict=True) if "mlp.experts" in name
    )
    if not adapter:
        assert step.state.flat.numel() == whole
        return
    share = next(iter(expert_layers(model).values())).expert_share
    rest = step.state.flat.numel() - of_experts
    assert of_experts * share.count == (whole - rest) * share.held
    assert share.held <= -(-share.count // ranks)
    for tensor in (step.state.flat, step.state.exp_avg, step.state.exp_avg_sq):
        assert tensor.numel() == rest + of_experts


def spread(model, world, adapter=True):
    """A rank then has its experts alone, at most ceil(E / n) / E of their bytes, and has read nothing else of
    the files but two samples of 4 KiB a layer."""
    layers = [m for m in model.modules() if isinstance(m, PackedExperts)]
    before = [sum(t.nbytes for t in stored(layer)) for layer in layers]
    readers = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RangeReader, "__exit__", lambda reader, *_: readers.append(reader))
        mg.expert_parallel(model, world, adapter=adapter)
    assert list(expert_layers(model).values()) == layers
    read = 0
    for layer, whole in zip(layers, before, strict=True):
        share = layer.expert_share
        after = sum(t.nbytes for t in vars(layer).values() if isinstance(t, torch.Tensor))
        assert sum(t.nbytes for t in stored(layer)) == 0
        read = after + read
        # A stack may be cut inside a group of 256 blocks, and one table serves all.
        cut = 2 * (256 * 33 + 1028) if layer.held("down_proj").double_quant else 0
        assert after <= whole * -(-share.count // world.size) / share.count + cut
    (reader,) = readers
    assert reader.from_memory <= 2 * 4 * len(layers)  # one number of each stack
    assert read <= reader.from_files + reader.from_memory <= read + 2 * 4096 * len(layers)


def stored(layer):
    return [p for p in parameters_of(layer).values() if p is not None]


@pytest.mark.parametrize(
    ("family", "mode", "sizes"),
    [
        ("qwen3_moe", "eager", [2, 3, 4]),
        pytest.param("gpt_oss", "graph", [3], marks=pytest.mark.slow),
        pytest.param("gpt_oss", "eager", [2, 3, 4], marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "graph", [2, 3, 4], marks=pytest.mark.slow),
        pytest.param("gpt_oss", "graph", [2, 4], marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "whole_step", [2, 3, 4], marks=pytest.mark.slow),
        pytest.param("gpt_oss", "whole_step", [2, 3, 4], marks=pytest.mark.slow),
        # Against one process in the same mode.
        pytest.param("qwen3_moe", "inductor", [2], marks=pytest.mark.slow),
    ],
)
def test_spread_experts_train_to_the_bits_of_whole_ones(family, mode, sizes, folder):
    found = run_ranks(max(sizes), "distributed/test_ep_step:compared", folder, family, mode, sizes)
    assert found[0] == []


@pytest.mark.slow
def test_a_whole_adapter_over_spread_experts_trains_to_the_same_bits(folder):
    found = run_ranks(2, "distributed/test_ep_step:compared", folder, "qwen3_moe", "eager", [2], False)
    assert found[0] == []


def refused(world, folder):
    """What is said on two ranks, in order."""
    model = build(folder, "qwen3_moe")
    found = [message(lambda: mg.expert_parallel(model, world, 3))]
    mg.expert_parallel(model, world)
    found.append(message(lambda: mg.expert_parallel(model, world)))
    found.append(message(model.merge_adapter))
    found.append(message(lambda: torch.save(model, f"{folder}/never-{world.rank}")))
    layer = next(iter(expert_layers(model).values()))
    found.append(message(lambda: layer.gate_up_proj.sum()))
    other = build(folder, "qwen3_moe")
    mg.shard(other, world)
    found.append(message(lambda: mg.expert_parallel(other, world)))
    found.append(message(lambda: model.save_pretrained(f"{folder}/unwritten-{world.rank}")))
    for mode in ("per_layer", "inductor_whole_step"):
        found.append(message(lambda mode=mode: TrainStep(model, mode=mode, world=world)))
    unlike = build(folder, "qwen3_moe")
    with torch.no_grad():
        next(p for name, p in unlike.named_parameters() if "experts" in name and p.requires_grad)[0, 0] += (
            world.rank
        )
    found.append(message(lambda: mg.expert_parallel(unlike, world)))
    return found


def test_what_is_refused(folder):
    first, second = run_ranks(2, "distributed/test_ep_step:refused", folder)
    assert first[0] == ("ValueError: expert_parallel: size is 3, wanted a divisor of 2, the number of ranks")
    assert "the experts are spread already" in first[1]
    for said, here in ((first, "experts 0 to 3 of 8 are here"), (second, "experts 4 to 7 of 8 are here")):
        assert here in said[2]
        assert "are spread over 2 ranks (expert_parallel)" in said[3]
        assert here in said[4]
    assert "wanted monograph.expert_parallel before monograph.shard" in first[5]
    assert re.search(r"weight is \[.*\], a share of \[.*\]: each rank has the factors of its own", first[6])
    assert "wanted monograph.whole_adapter(model) around what writes them" in first[6]
    for said in (first, second):
        for mode, told in zip(("per_layer", "inductor_whole_step"), said[7:9], strict=True):
            assert f"mode is '{mode}' and experts are spread over ranks" in told
            assert "wanted one of graph, whole_step, inductor, eager" in told
        assert "with SHA-256" in said[9]
        assert "wanted the same on all ranks" in said[9]


def drifted(world, folder):
    """One rank's trace of a layer gets a call more, as a compiler that keeps what others leave out."""
    model = build(folder, "qwen3_moe")
    mg.expert_parallel(model, world)
    step = TrainStep(model, mode="graph", world=world)
    first, second, _ = batches()
    step(first, 1e-2)
    lists = {exchanges_in(traced.forward) for traced in TRACES.by_number.values()}
    assert lists == {("monograph::ep_experts",)}
    if world.rank:
        graph = next(iter(TRACES.by_number.values())).forward.graph
        node = next(n for n in graph.nodes if n.target is torch.ops.monograph.ep_experts.default)
        with graph.inserting_after(node):
            graph.node_copy(node)
    return message(lambda: step(second, 1e-2))


@pytest.mark.slow
def test_ranks_whose_traces_differ_are_refused_before_they_wait(folder):
    for said in run_ranks(2, "distributed/test_ep_step:drifted", folder):
        assert "calls of spread experts in the traces of layers (hash)" in said


class _OfMany:
    """Sizes alone are looked at before the ranks exchange anything."""

    rank, size = 0, 16


def test_more_ranks_than_experts_and_experts_that_are_not_packed(folder):
    model = build(folder, "qwen3_moe")
    assert mg.expert_parallel(model, alone()) is model
    with pytest.raises(ValueError, match=r"size is 16, and .*mlp.experts.* has 8 experts; wanted 8 or less"):
        mg.expert_parallel(model, _OfMany())
    dense = mg.from_pretrained(f"{folder}/dense/qwen3_moe", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"experts of .*gate_up_proj are trained, wanted a quantised base"):
        mg.expert_parallel(dense, _OfMany())
    dense.requires_grad_(False)
    with pytest.raises(ValueError, match=r"experts of .*gate_up_proj are dense, wanted a quantised base"):
        mg.expert_parallel(dense, _OfMany())


def test_owners_have_every_expert_once():
    for count in range(1, 9):
        for ranks in range(1, count + 1):
            parts = [list(owned(rank, ranks, count)) for rank in range(ranks)]
            assert [e for part in parts for e in part] == list(range(count))
            assert max(map(len, parts)) == -(-count // ranks)
            assert min(map(len, parts)) > 0
