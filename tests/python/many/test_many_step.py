"""Seven adapters in one step: each has the hash of its own TrainStep, whoever joins or retires beside it."""

import pytest
import torch

import monograph as mg
from monograph.many.adapter_run import AdapterRun
from monograph.many.shared_base import with_same_base
from monograph.many.step import ManyStep
from monograph.training.regions import make_regions
from monograph.training.regions.registry import TRACES
from support.many_runs import alone, base, batches, digest, lora, result_of, seven
from support.tiny_moe import tiny_model

STEPS = 2
# A pairwise selection of (family, dtype, mode, rows, checkpointing); the whole product is `long`.
PAIRS = [
    ("llama", torch.bfloat16, "eager", "apart", True),
    ("qwen3", torch.float32, "eager", "joined", False),
]
SLOW = [
    ("llama", torch.bfloat16, "graph", "joined", True),
    ("qwen3", torch.bfloat16, "graph", "apart", False),
    ("llama", torch.float32, "whole_step", "apart", False),
]
PRODUCT = [
    pytest.param(*case, marks=[pytest.mark.slow, *([] if case in SLOW else [pytest.mark.long])])
    for case in [
        (family, dtype, mode, rows, checkpointing)
        for family in ("llama", "qwen3")
        for dtype in (torch.bfloat16, torch.float32)
        for mode in ("eager", "graph", "whole_step")
        for rows in (("apart",) if mode == "whole_step" else ("apart", "joined"))
        for checkpointing in (False, True)
    ]
    if case not in PAIRS
]


@pytest.mark.parametrize(("family", "dtype", "mode", "rows", "checkpointing"), [*PAIRS, *PRODUCT])
def test_each_has_the_hash_that_it_has_alone(family, dtype, mode, rows, checkpointing, monkeypatch):
    runs = seven()
    if mode == "whole_step":  # which holds one micro-batch
        monkeypatch.setattr("support.many_runs.MICRO_BATCHES", dict.fromkeys(runs, 1))
    step = ManyStep(base(family, dtype, checkpointing), runs, mode=mode, rows=rows)
    found = {name: [] for name in runs}
    for number in range(STEPS):
        results = step({name: batches(name, number) for name in runs})
        for name, result in results.items():
            found[name].append(result_of(result))
    for name, run in runs.items():
        wanted = alone(name, run, STEPS, mode, base(family, dtype, checkpointing))
        assert (digest(step.step_of(name)), found[name]) == wanted, name


@pytest.mark.parametrize("count", [1, 16])
def test_one_adapter_and_sixteen_whose_ranks_sum_to_more_than_512(count):
    runs = {f"a{i}": AdapterRun(lora(33 + i % 2), 2e-3, seed=i) for i in range(count)}
    step = ManyStep(base(), runs, mode="eager", rows="joined")
    results = step({name: batches(name, 0) for name in runs})
    for name, run in runs.items():
        wanted = alone(name, run, 1, "eager", base())
        assert (digest(step.step_of(name)), [result_of(results[name])]) == wanted, name


@pytest.mark.slow
def test_experts_are_trained_side_by_side():
    """Of a mixture: LoRA on the experts' weights, whose factors are stacks."""
    runs = {
        name: AdapterRun(lora(r, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
                         2e-3, seed=r)
        for name, r in (("a", 4), ("b", 1))
    }  # fmt: skip
    step = ManyStep(tiny_model("qwen3_moe", vocab_size=256), runs, mode="eager")
    for number in range(STEPS):
        step({name: batches(name, number) for name in runs})
    for name, run in runs.items():
        model = tiny_model("qwen3_moe", vocab_size=256)
        assert digest(step.step_of(name)) == alone(name, run, STEPS, "eager", model)[0]


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["apart", "joined"])
def test_one_retires_another_joins_and_one_is_resumed_in_other_company(rows):
    runs = seven()
    step = ManyStep(base(), {name: runs[name] for name in ("norm", "bias", "wide")}, mode="graph", rows=rows)
    for number in range(2):
        step({name: batches(name, number) for name in ("norm", "bias", "wide")})
    kept = step.state_dict("bias")
    step.retire("norm")
    traces = len(TRACES.by_number)
    step.join("many", AdapterRun(lora(8), 1e-2, seed=1))  # of the kind of `norm`: its slot, nothing is traced
    with torch._dynamo.config.patch(error_on_recompile=True):
        for number in range(2):
            step({name: batches(name, number + 2 * (name == "wide")) for name in ("many", "wide")})
    assert len(TRACES.by_number) == traces
    other = ManyStep(base(), {"dora": runs["dora"], "bias": runs["bias"]}, mode="eager", rows=rows)
    other.load_state_dict("bias", kept)
    for number in range(2, 4):
        other({name: batches(name, number) for name in ("bias", "dora")})
    assert digest(other.step_of("bias")) == alone("bias", runs["bias"], 4, "eager", base())[0]
    assert digest(step.step_of("wide")) == alone("wide", runs["wide"], 4, "eager", base())[0]
    joined = AdapterRun(lora(8), 1e-2, seed=1)
    assert digest(step.step_of("many")) == alone("many", joined, 2, "eager", base())[0]


@pytest.mark.parametrize(("bad", "rows"), [(float("inf"), "joined"), (float("nan"), "apart")])
def test_what_is_not_finite_in_one_skips_its_steps_alone(bad, rows):
    runs = {name: seven()[name] for name in ("norm", "bias", "dora")}
    step = ManyStep(base(), runs, mode="eager", rows=rows)
    with torch.no_grad():
        broken = next(p for n, p in step.model("bias").named_parameters() if "lora_B" in n)
        broken.fill_(bad)
    before = digest(step.step_of("bias"))
    for number in range(STEPS):
        results = step({name: batches(name, number) for name in runs})
    assert not results["bias"].grad_norm.isfinite()
    assert digest(step.step_of("bias")) == before
    for name in ("norm", "dora"):
        assert digest(step.step_of(name)) == alone(name, runs[name], STEPS, "eager", base())[0]


def test_the_base_is_in_memory_once():
    model = base()
    step = ManyStep(model, {name: seven()[name] for name in ("norm", "dora")}, mode="eager")
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    for name in step.names:
        for found, tensor in [*step.model(name).named_parameters(), *step.model(name).named_buffers()]:
            mine = "lora_" in found or "row_squares" in found
            assert mine != (tensor.untyped_storage().data_ptr() in own), found
    assert [name for name, p in model.named_parameters() if "lora" in name] == []


def test_those_without_batches_rest_and_torchs_generator_stays():
    model = base()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    step = ManyStep(model, {name: seven()[name] for name in ("norm", "many")}, mode="eager")
    assert torch.equal(torch.get_rng_state(), state)
    before = digest(step.step_of("many"))
    assert list(step({"norm": batches("norm", 0), "many": []})) == ["norm"]
    assert digest(step.step_of("many")) == before
    result = step({"many": batches("many", 0)}, {"many": 0.5})["many"]
    assert digest(step.step_of("many")) != before
    assert result.targets > 0


def test_what_cannot_be_beside_others_is_named():
    step = ManyStep(base(), {}, mode="eager")
    for options, message in [
        ({"init_lora_weights": "pissa"}, "adapter a: init_lora_weights is pissa, which changes the base"),
        ({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}, "init_lora_weights is loftq"),
        ({"modules_to_save": ["lm_head"]}, "adapter a: modules_to_save trains tensors of the base"),
        ({"trainable_token_indices": [1]}, "adapter a: trainable_token_indices trains tensors of the base"),
    ]:
        with pytest.raises(ValueError, match=message):
            step.join("a", AdapterRun(lora(4, **options)))
    with pytest.raises(ValueError, match="there is no adapter 'b', wanted one of none"):
        step({"b": batches("b", 0)})
    step.join("a", AdapterRun(lora(4)))
    with pytest.raises(ValueError, match="adapter a is trained already"):
        step.join("a", AdapterRun(lora(4)))
    with pytest.raises(ValueError, match="there is no adapter 'b', wanted one of a"):
        step({"a": batches("a", 0)}, {"b": 1e-3})
    with pytest.raises(ValueError, match="has an adapter of PEFT"):
        ManyStep(mg.add_lora(base(), lora(4)), {})
    with pytest.raises(ValueError, match="the base has regions"):
        with_same_base(make_regions(base()))


def test_what_would_not_be_right_in_one_batch_is_named():
    def joined(model, *, mode="eager", **options):
        return ManyStep(model, {"a": AdapterRun(lora(4, **options))}, mode=mode, rows="joined")

    with pytest.raises(ValueError, match="rows is 'mixed', wanted apart or joined"):
        ManyStep(base(), {}, rows="mixed")
    with pytest.raises(ValueError, match="mode 'whole_step', wanted graph or eager"):
        joined(base(), mode="whole_step")
    with pytest.raises(ValueError, match="has DoRA with dropout, wanted rows"):
        joined(base(), dropout=0.1, use_dora=True)
    experts = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    with pytest.raises(ValueError, match="adapts experts, wanted rows"):
        joined(tiny_model("qwen3_moe", torch.bfloat16), **experts)
    step = joined(base())
    packed = batches("norm", 0)[0]
    padded = {"input_ids": packed["input_ids"], "labels": packed["labels"]}
    with pytest.raises(
        ValueError, match="adapter a: rows are joined and a micro-batch has input_ids, labels"
    ):
        step({"a": [padded]})
