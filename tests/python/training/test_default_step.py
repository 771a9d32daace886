"""The default step, a graph of regions: many of them, adapters switched, layers that are none, no g++."""

import gc
import os
import subprocess
import sys

import pytest
import torch
import torch._dynamo
from peft import LoraConfig
from torch._dynamo.utils import counters

import monograph as mg
from monograph.training import TrainStep
from monograph.training.regions import TRACES, forget, make_regions, region_layers
from support import step_models
from support.region_models import InPlace, assert_same, batch, build, compiled, ids, steps_equal, trained_b
from support.tiny_moe import save_tiny

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def fresh():
    gc.collect()
    forget()
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def test_steps_do_not_count_against_each_other():
    """The tracer limits the recompiles of a function (8, here 2); each step has functions of its own."""
    steps = [TrainStep(build(), backend="eager") for _ in range(4)]
    with torch._dynamo.config.patch(recompile_limit=2, error_on_recompile=True):
        losses = {step([batch()], 1e-2).loss.item() for step in steps}
    assert len(losses) == 1
    assert counters["stats"]["unique_graphs"] == len(steps)


def test_traces_go_with_the_last_layer_that_used_them():
    step, other = (TrainStep(build(2), backend="eager") for _ in range(2))
    for each in (step, other):
        each([batch()], 1e-2)
        each.evaluate(batch())
    assert TRACES.signatures == 4  # a model has its own config
    del step, each
    gc.collect()
    assert TRACES.signatures == 2
    other([batch()], 1e-2)
    del other
    gc.collect()
    assert (TRACES.signatures, len(TRACES.by_number), len(TRACES.users)) == (0, 0, 0)


def test_adapters_of_a_compiled_model_are_switched_as_in_eager_mode():
    model, plain = make_regions(build()), build()
    for each in (model, plain):
        torch.manual_seed(3)
        each.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj"]))
        trained_b(each)
    step = compiled(model)

    def same():
        found = []
        for run, each in ((step, model), (compiled_not(plain), plain)):
            loss = run(ids())
            trained = [p for p in each.parameters() if p.requires_grad]
            found.append([loss, *(torch.autograd.grad(loss, trained) if trained else [])])
        assert all(torch.equal(got, want) for got, want in zip(*found, strict=True))
        return found[0][0].item()

    first = same()
    with model.disable_adapter(), plain.disable_adapter():
        assert same() != first
    assert same() == first
    for each in (model, plain):
        each.set_adapter("other")
    assert same() != first
    for each in (model, plain):
        each.set_adapter("default")
    assert same() == first


def compiled_not(model):
    return lambda tokens: model(input_ids=tokens, labels=tokens, use_cache=False).loss


def test_a_parameter_that_was_replaced_is_named():
    model = make_regions(build())
    step = compiled(model)
    step(ids())
    layer = next(iter(region_layers(model).values()))
    factor = layer.mlp.down_proj.lora_B["default"]
    factor.weight = torch.nn.Parameter(torch.ones_like(factor.weight))
    with pytest.raises(RuntimeError, match=r"lora_B.default.weight was replaced after the step was compiled"):
        step(ids())


def test_all_is_dropped_with_probability_one():
    config = LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=1.0)
    assert_same(make_regions(build(config=config)), build(config=config))
    steps_equal(TrainStep(build(config=config)), TrainStep(build(config=config), mode="eager"))


@pytest.mark.parametrize("mode", ["graph", "whole_step"])
def test_a_layer_that_has_no_trace_is_named_and_computed_in_the_same_graph(mode, caplog):
    models = [build(3), build(3)]
    for model in models:
        model.get_base_model().model.layers[1].__class__ = InPlace
    step, eager = TrainStep(models[0], mode=mode), TrainStep(models[1], mode="eager")
    steps_equal(step, eager)
    named = r"mode graph: base_model.model.model.layers.1 (InPlace) cannot be regions: it changes a tensor"
    assert named.replace("graph", mode) in caplog.text
    assert len(region_layers(models[0])) == 2
    assert step.mode == mode


def test_layers_that_are_others_are_named(caplog):
    model, plain = build(2), build(2)
    called = []
    for each in (model, plain):
        each.get_base_model().model.layers[0].register_forward_hook(lambda *_: called.append(1) and None)
    with pytest.raises(ValueError, match=r"layers\.0 has a forward or hooks of somebody else"):
        make_regions(model)
    assert not region_layers(model)
    step = TrainStep(model)
    assert "layers.0 has a forward or hooks of somebody else" in caplog.text
    assert list(region_layers(model)) == ["base_model.model.model.layers.1"]
    layer = next(iter(region_layers(model).values()))
    for each in (layer, plain.get_base_model().model.layers[1]):
        each.mlp.register_forward_hook(lambda *_: None)
    steps_equal(step, TrainStep(plain, mode="eager"))
    assert "layers.1 (LlamaDecoderLayer) cannot be regions: mlp has a hook" in caplog.text


@pytest.mark.parametrize("mode", ["graph", "whole_step"])
def test_a_parameter_of_two_layers_is_trained(mode, caplog):
    models = [build(2), build(2)]
    for model in models:
        first, second = model.get_base_model().model.layers
        second.mlp.down_proj.lora_A["default"].weight = first.mlp.down_proj.lora_A["default"].weight
    steps_equal(TrainStep(models[0], mode=mode), TrainStep(models[1], mode="eager"))
    named = "layers.1 (LlamaDecoderLayer) cannot be regions: they share a trained parameter"
    assert (named in caplog.text) == (mode == "whole_step")


def test_switching_the_adapter_of_a_step_is_refused_by_name():
    step = TrainStep(build())
    step.model.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj"]))
    step.model.set_adapter("other")
    with pytest.raises(RuntimeError, match=r"the trained parameters are not those .*layers\.0") as caught:
        step([batch()], 1e-2)
    assert type(caught.value) is RuntimeError


def test_layers_with_packed_experts_are_one_kind(tmp_path):
    save_tiny(tmp_path, "qwen3_moe")
    steps = []
    for mode in ("graph", "eager"):
        model = mg.from_pretrained(tmp_path, mg.MonographConfig("nf4"), dtype=torch.float32)
        torch.manual_seed(1)
        adapted = mg.add_lora(model, LoraConfig(r=4, target_modules=["q_proj", "o_proj"]))
        steps.append(TrainStep(adapted, mode=mode, backend="eager"))
    steps_equal(*steps)
    assert len(region_layers(steps[0].model)) == 2
    assert TRACES.signatures == 1


@pytest.mark.parametrize(("family", "packed"), [("llama", False), ("gemma3", True)])
def test_checkpointing_keeps_no_more_than_the_flat_graph(family, packed):
    rows = step_models.batches(packed, 3)[:2]
    saved = []
    for regions in (True, False):
        model = step_models.build(family, True)
        report = mg.doctor(make_regions(model) if regions else model, rows, quiet=True)
        assert (report.graphs, report.recompiles) == (1, [])
        saved.append({kind: size for kind, size in report.saved_bytes.items() if "no copy" not in kind})
    assert sum(saved[0].values()) <= sum(saved[1].values())


WITHOUT_A_COMPILER = """
import shutil
assert not any(shutil.which(name) for name in ("g++", "gcc", "c++", "cc", "clang", "clang++"))
from monograph.training import TrainStep
from support.region_models import build, steps_equal
for mode in ("graph", "whole_step"):
    steps_equal(TrainStep(build(2), mode=mode), TrainStep(build(2), mode="eager"))
"""


def test_no_compiler_is_needed(tmp_path):
    """Same graphs, same bits: nothing of the default step waits for a compiler."""
    environment = os.environ | {"PATH": str(tmp_path), "CXX": str(tmp_path / "none")}
    command = [sys.executable, "-c", WITHOUT_A_COMPILER]
    subprocess.run(command, env=environment, check=True, timeout=600)
