"""TrainStep on 1, 2, 3 and 4 ranks: one hash of the parameters, one list of losses and norms, one graph."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest
import torch
import torch._dynamo
from peft import LoraConfig
from torch._dynamo.utils import counters

import monograph as mg
from monograph.distributed import Tree, World, alone
from monograph.nn import replace_linears
from monograph.packing import PackedCollator, PaddedCollator
from monograph.training import TrainStep, forward_loss
from monograph.training.loss import count_targets
from monograph.training.loss_scale import LossScale
from support.run_ranks import run_ranks, smaller_worlds
from support.tiny_models import tiny_llama

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 128,
}
POISON = 127  # a token whose embedding is NaN
RATE = 1e-2
STEPS = 3


def build(dtype=torch.bfloat16, seed=0):
    """NF4, double-quantised, with dropout before the adapters."""
    model = tiny_llama(dtype=dtype, **SIZES)
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
    replace_linears(model, "nf4", double_quant=True)
    torch.manual_seed(seed)
    config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, init_lora_weights=False)
    return mg.add_lora(model, config)


def rows(count, seed=1, packed=True, poisoned=()):
    """Batches of different lengths with several documents each; the last padded one has one row."""
    generator = torch.Generator().manual_seed(seed)
    collate = PackedCollator(max_documents=8) if packed else PaddedCollator()
    found = []
    for number in range(count):
        documents = 1 if number == count - 1 and not packed else 2 + number % 3
        lengths = torch.randint(4, 30, (documents,), generator=generator).tolist()
        ids = [torch.randint(0, POISON, (n,), generator=generator).tolist() for n in lengths]
        if number in poisoned:
            ids[0][1] = POISON
        found.append(collate([{"input_ids": row} for row in ids]))
    return found


class Lazy(Sequence):
    """A sequence that keeps which of its batches were read."""

    def __init__(self, batches):
        self.batches, self.read = batches, []

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        self.read.append(index)
        return self.batches[index]


def bits(step, results):
    """What must be the same on any number of ranks."""
    flat = hashlib.sha256(step.state.flat.numpy().tobytes()).hexdigest()
    numbers = [
        [
            r.loss.item().hex(),
            r.grad_norm.item().hex(),
            r.targets,
            None if r.loss_scale is None else r.loss_scale.item(),
        ]
        for r in results
    ]
    return {"flat": flat, "steps": numbers}


def accumulated(world, mode, micro_batches=12, shards=None, packed=True, **options):
    """Three steps; every rank reads its own micro-batches, and the first of all to compare."""
    step = TrainStep(build(), mode=mode, weight_decay=0.1, world=world, virtual_shards=shards, **options)
    results = []
    for number in range(STEPS):
        batches = Lazy(rows(micro_batches, seed=number, packed=packed))
        results.append(step(batches, RATE))
        own = list(Tree(micro_batches, shards or micro_batches).own(world.rank, world.size))
        assert batches.read == own + [0] * (0 not in own)
    return bits(step, results)


def whole(world, mode, micro_batches):
    """Eight steps of other lengths. On as many ranks as micro-batches it is one graph, the sum inside."""
    torch._dynamo.reset()
    counters.clear()
    inside = world.size == micro_batches
    options = {} if mode == "whole_step" else {"backend": "aot_eager"}
    step = TrainStep(build(), mode=mode if inside else "eager", world=world, **(options if inside else {}))
    results = []
    for number in range(8):
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            results.append(step(rows(micro_batches, seed=10 + number), RATE))
    if inside:
        assert counters["stats"]["unique_graphs"] == 1
        assert not counters["graph_break"]
    return bits(step, results)


def scaled(world, mode):
    """float16: the first steps overflow and change the scale alone, on every rank."""
    step = TrainStep(build(torch.float16), mode=mode, world=world)
    step.loss_scale = LossScale(2.0**21, growth_interval=2)
    found = bits(step, [step(rows(4, seed=number), RATE) for number in range(8)])
    assert {"nan", "inf"} & {norm for _, norm, _, _ in found["steps"]}
    assert 0 < step.state.steps < 8
    return found


def poisoned(world, mode):
    """A NaN loss on one rank: the second of three steps is skipped on all."""
    step = TrainStep(build(), mode=mode, world=world)
    results, flats = [], []
    for number in range(3):
        results.append(step(rows(4, seed=number, poisoned=(2,) if number == 1 else ()), RATE))
        flats.append(step.state.flat.clone())
    assert torch.equal(flats[0], flats[1])
    assert not torch.equal(flats[1], flats[2])
    found = bits(step, results)
    assert [loss == "nan" for loss, _, _, _ in found["steps"]] == [False, True, False]
    return found


def evaluated(world):
    """Of a model that has not made a step: seven batches, fewer than ranks, none."""
    step = TrainStep(build(), mode="eager", world=world)
    found = []
    for count, packed in [(7, True), (3, False), (1, True), (0, True)]:
        loss, targets = step.evaluate_all(Lazy(rows(count, packed=packed)))
        found.append([loss.hex(), targets])
    return found


def refused(world):
    """What ranks must have alike, and have not."""
    if world.size == 1:
        return None
    with pytest.raises(ValueError, match="the trained parameters of rank 1 are not those of rank 0; wanted"):
        TrainStep(build(seed=world.rank), world=world)
    step = TrainStep(build(), mode="eager", world=world)
    if world.size == 2:
        with pytest.raises(ValueError, match="number of micro-batches is 4 on rank 0, 5 on rank 1; wanted"):
            step(rows(4 + world.rank), RATE)
    return None


def runs(world: World):
    """Every case on this rank. What is compiled takes seconds: one number of ranks each, besides `graph`."""
    found = {mode: accumulated(world, mode) for mode in ("eager", "graph")}
    found["M=7 V=12"] = accumulated(world, "eager", 7, 12)
    found["M=12 V=5"] = accumulated(world, "eager", 12, 5)
    found["M=2"] = accumulated(world, "eager", 2)
    found["M=1"] = accumulated(world, "eager", 1)
    found["padded"] = accumulated(world, "eager", 4, packed=False)
    found["evaluated"] = evaluated(world)
    for micro_batches in (2, 3, 4):
        if world.size in (1, micro_batches):
            found[f"whole {micro_batches}"] = whole(world, "whole_step", micro_batches)
    found |= {"scaled": scaled(world, "eager"), "poisoned": poisoned(world, "eager")}
    if world.size == 4:  # of four micro-batches: one graph
        found |= {
            "scaled whole": scaled(world, "whole_step"),
            "poisoned whole": poisoned(world, "whole_step"),
        }
    if world.size == 3:
        found["whole_step"] = accumulated(world, "whole_step")
    if world.size == 2:
        found["inductor"] = accumulated(world, "inductor", backend="aot_eager")
        found["inductor_whole 2"] = whole(world, "inductor_whole_step", 2)
    refused(world)
    return found


def all_runs(world: World):
    return {own.size: runs(own) for own in smaller_worlds(world, [4, 3, 2])}


@pytest.fixture(scope="module")
def one_process():
    torch._dynamo.reset()
    yield runs(alone())
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def on_ranks():
    return run_ranks(4, "distributed/test_step_over_ranks:all_runs", timeout=900)


# Modes whose bits are those of another.
SAME = {
    "graph": "eager",
    "whole_step": "eager",
    "inductor": "eager",
    "inductor_whole 2": "whole 2",
    "scaled whole": "scaled",
    "poisoned whole": "poisoned",
}


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3, 4])
def test_any_number_of_ranks_gives_one_hash(ranks, one_process, on_ranks):
    for result in on_ranks[:ranks]:
        found = result[str(ranks)]
        assert found == {name: one_process[SAME.get(name, name)] for name in found}
        assert {"eager", "graph", f"whole {ranks}", "evaluated"} <= found.keys()


def reference():
    """Three steps of twelve micro-batches: gradients by PyTorch, one by one, and a recursion."""
    model = build()
    step = TrainStep(model, mode="eager", weight_decay=0.1)  # its flat parameters and their update
    model.train()
    losses, norms = [], []
    for number in range(STEPS):
        batches = rows(12, seed=number)
        targets = torch.tensor(float(sum(count_targets(batch) for batch in batches)))

        def leaf(index, number=number, batches=batches, targets=targets):
            step.dropout_seed.fill_(number * 4096 + index)
            loss = forward_loss(model, batches[index], targets)
            gradients = torch.autograd.grad(loss, step.state.parameters)
            return loss.detach(), torch.cat([g.float().reshape(-1) for g in gradients])

        def halves(a, b, leaf=leaf):
            if b - a == 1:
                return leaf(a)
            m = a + (b - a) // 2
            (left, left_gradient), (right, right_gradient) = halves(a, m), halves(m, b)
            return left + right, left_gradient + right_gradient

        loss, gradient = halves(0, 12)
        norm = step.state.update(gradient, torch.tensor(RATE), *step._hyper)
        losses.append(loss.item().hex())
        norms.append(norm.item().hex())
    return step, losses, norms


def test_it_is_the_sum_of_pytorchs_gradients(one_process):
    step, losses, norms = reference()
    found = one_process["eager"]
    assert [row[0] for row in found["steps"]] == losses
    assert [row[1] for row in found["steps"]] == norms
    assert found["flat"] == hashlib.sha256(step.state.flat.numpy().tobytes()).hexdigest()


def test_evaluation_is_that_of_single_batches(one_process):
    step = TrainStep(build(), mode="eager")
    for (loss, targets), (count, packed) in zip(
        one_process["evaluated"], [(7, True), (3, False), (1, True), (0, True)], strict=True
    ):
        pairs = [step.evaluate(batch) for batch in rows(count, packed=packed)]
        total = 0.0
        for part, _ in pairs:
            total += float(part)
        assert loss == total.hex()
        assert targets == sum(number for _, number in pairs)


def test_virtual_shards_are_checked():
    with pytest.raises(ValueError, match="virtual_shards is 0, wanted a whole number, 1 or more"):
        TrainStep(build(), virtual_shards=0)
