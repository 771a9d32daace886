"""What ManyStep is given and cannot do right is named, and so is what is set in an adapter between steps."""

import math

import pytest
import torch

from monograph.many.adapter_run import AdapterRun
from monograph.many.step import ManyStep
from support.many_runs import alone, base, batches, digest, lora, result_of


def two(rows="joined", **options):
    runs = {"a": AdapterRun(lora(4, 0.1), **options), "b": AdapterRun(lora(8))}
    return ManyStep(base(), runs, mode="eager", rows=rows)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"learning_rate": math.nan}, "adapter a: learning_rate is nan, wanted a number, 0 or more"),
        ({"learning_rate": "x"}, "adapter a: learning_rate is 'x'"),
        ({"seed": 1.5}, "adapter a: seed is 1.5, wanted a whole number of 64 bits"),
        ({"seed": 2**64}, "adapter a: seed is 18446744073709551616"),
        ({"max_grad_norm": -1}, "adapter a: max_grad_norm is -1, wanted a number, 0 or more"),
        ({"weight_decay": math.inf}, "adapter a: weight_decay is inf"),
        ({"betas": (0.9,)}, r"adapter a: betas is \(0.9,\), wanted two numbers"),
        ({"betas": (0.9, 1.0)}, r"adapter a: betas\[1\] is 1.0, wanted a number, 0 or more and less than 1"),
        ({"eps": None}, "adapter a: eps is None"),
        ({"options": {"nonsense": 1}}, "adapter a: options has 'nonsense', wanted some of loss_scaling"),
        ({"options": {"mode": "eager"}}, "adapter a: options has 'mode'"),
    ],
)
def test_numbers_of_a_run(given, message):
    with pytest.raises(ValueError, match=message):
        ManyStep(base(), {"a": AdapterRun(lora(4), **given)}, mode="eager")


def test_what_is_no_run_no_name_and_no_base():
    for name, run, message in [
        ("", AdapterRun(lora(4)), "an adapter is called '', wanted a word"),
        (5, AdapterRun(lora(4)), "an adapter is called 5, wanted a word"),
        ("a", {"r": 4}, "adapter a is a dict, wanted an AdapterRun"),
        ("a", AdapterRun("lora"), "adapter a: config is a str, wanted a LoraConfig"),
    ]:
        with pytest.raises(ValueError, match=message):
            ManyStep(base(), {name: run}, mode="eager")
    with pytest.raises(ValueError, match="the base is a NoneType, wanted a model"):
        ManyStep(None, {})


@pytest.mark.parametrize("rows", ["joined", "apart"])
def test_rates_and_batches_that_are_none_leave_all_as_it_was(rows):
    step = two(rows)
    good = batches("norm", 0)
    before = digest(step.step_of("a")), digest(step.step_of("b"))
    for given, rates, message in [
        ({"a": good}, {"a": math.nan}, "adapter a: learning_rate is nan"),
        ({"a": good}, {"a": -1.0}, "adapter a: learning_rate is -1.0"),
        ({"a": good}, {"a": True}, "adapter a: learning_rate is True"),
        ({"b": good, "a": good[0]}, {}, "adapter a: its micro-batches are or have a dict, wanted a list"),
        ({"b": good, "a": [None]}, {}, "adapter a: its micro-batches are or have a NoneType"),
        ({"b": good, "a": iter(good)}, {}, "adapter a: its micro-batches are or have a list_iterator"),
    ]:
        with pytest.raises(ValueError, match=message):
            step(given, rates)
    with pytest.raises(ValueError, match="adapter a: learning_rate is inf"):
        step.set_learning_rate("a", math.inf)
    assert (digest(step.step_of("a")), digest(step.step_of("b"))) == before
    assert step({"a": None, "b": []}) == {}


@pytest.mark.parametrize("borders", [[30, 24, 0], [1, 24, 30], [0, 24, 37], [], [0.0, 24.0, 30.0]], ids=str)
def test_borders_that_would_reach_into_a_neighbours_row_are_named(borders):
    """With borders from 1 the first token of `a` was one more of the adapter before it."""
    (batch,) = batches("norm", 0)
    assert batch["cu_seqlens"].tolist() == [0, 24, 30]
    kind = torch.float32 if borders[1:2] == [24.0] and isinstance(borders[1], float) else torch.int32
    wrong = {**batch, "cu_seqlens": torch.tensor(borders, dtype=kind)}
    with pytest.raises(
        ValueError, match=r"adapter a: cu_seqlens is \[.*wanted whole ascending numbers from 0"
    ):
        two()({"b": [batch], "a": [wrong]})


def set_dropout(model):
    layer = next(m for m in model.modules() if "default" in getattr(m, "lora_dropout", {}))
    layer.lora_dropout["default"].p = 0.5


def set_scaling(model):
    layer = next(m for m in model.modules() if hasattr(m, "lora_A"))
    layer.scaling["default"] = 7.0


def set_hook(model):
    layer = next(m for m in model.modules() if hasattr(m, "lora_A"))
    layer.register_forward_hook(lambda module, given, out: out * 0.5)


@pytest.mark.parametrize("change", [set_dropout, set_scaling, set_hook])
def test_what_is_set_in_an_adapters_modules_between_steps(change):
    """Apart it counts; joined rows are computed by other modules, so that it is told."""
    step, wanted = two("apart"), two("apart")
    for number in range(2):
        step({"a": batches("norm", number)})
        wanted({"a": batches("norm", number)})
        if number == 0:
            change(step.model("a"))
    assert digest(step.step_of("a")) != digest(wanted.step_of("a"))
    joined = two()
    joined({"a": batches("norm", 0), "b": batches("many", 0)})
    before = digest(joined.step_of("b"))
    change(joined.model("a"))
    with pytest.raises(
        ValueError, match=r"adapter a: base_model.* when it joined; rows that are joined keep"
    ):
        joined({"a": batches("norm", 1), "b": batches("many", 1)})
    assert digest(joined.step_of("b")) == before
    joined({"b": batches("many", 1)})  # who rests says nothing


@pytest.mark.parametrize("rows", ["joined", "apart"])
def test_virtual_shards_are_those_of_the_adapter(rows):
    """Five micro-batches summed one after the other: in float32 other bits than in a tree of five leaves."""
    model = base("llama", torch.float32)
    found = {}
    for shards in (None, 1):
        run = AdapterRun(lora(8), 1e-2, seed=1, options={"virtual_shards": shards})
        step = ManyStep(model, {"many": run, "b": AdapterRun(lora(4))}, mode="eager", rows=rows)
        result = step({"many": batches("many", 0), "b": batches("norm", 0)})["many"]
        found[shards] = digest(step.step_of("many")), [result_of(result)]
        assert found[shards] == alone("many", run, 1, "eager", base("llama", torch.float32))
    assert found[None] != found[1]


def test_what_a_step_of_joined_rows_would_leave_out_is_named(tmp_path):
    with pytest.raises(ValueError, match='options has offload, wanted rows="apart"'):
        two(options={"offload": "disk", "offload_folder": str(tmp_path)})


def test_a_run_that_joins_again_finds_its_slot():
    """PEFT writes into a config what it finds in the model; that would be another kind, with other graphs."""
    run = AdapterRun(lora(4), seed=1)
    step = ManyStep(base(), {"a": run}, mode="eager")
    slot = step.step_of("a")
    step({"a": batches("norm", 0)})
    step.retire("a")
    step.join("a", run)
    assert step.step_of("a") is slot
    assert run.config.target_modules == "all-linear"
    step({"a": batches("norm", 0)})
    assert digest(step.step_of("a")) == alone("norm", run, 1, "eager", base())[0]
