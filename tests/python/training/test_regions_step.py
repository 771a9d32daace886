"""The step as one outer graph of regions: counted and compared bit for bit with eager mode."""

import itertools

import pytest
import torch
import torch._dynamo
from peft import LoraConfig
from torch import nn
from torch._dynamo.utils import counters

import monograph as mg
from monograph.nn import QuantLinear
from monograph.ops.formats import ABSMAX_FORMATS, FORMATS
from monograph.training import TrainStep
from monograph.training.regions import TRACES, forget, region_layers
from support import step_models

pytestmark = pytest.mark.slow
SMALL = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
LAYER_TYPES = {"gemma3": ["sliding_attention", "full_attention", "sliding_attention"]}
# Every pair of values of two columns meets: family, checkpointing, dropout, DoRA, nested scales, packed rows,
# mode. The linears of a layer have every format.
COVER = [
    ("llama", False, 0.0, False, False, False, "graph"),
    ("llama", True, 0.05, True, True, True, "whole_step"),
    ("qwen3", False, 0.05, True, False, True, "graph"),
    ("qwen3", True, 0.0, False, True, False, "whole_step"),
    ("gemma3", True, 0.05, True, False, False, "graph"),
    ("gemma3", False, 0.0, False, True, True, "whole_step"),
    ("mistral", True, 0.0, True, False, True, "whole_step"),
    ("mistral", False, 0.05, False, True, False, "graph"),
]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    for name, value in SMALL.items():
        monkeypatch.setitem(step_models.SMALL, name, value)
    forget()
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def build(family, checkpointing=False, dropout=0.0, dora=False, nested=False):
    """As test_train_step's, with the formats one after the other; Gemma 3 has layers of two kinds."""
    config_class, model_class, options = step_models.FAMILIES[family]
    types = LAYER_TYPES.get(family)
    sizes = step_models.SMALL | options | ({"layer_types": types} if types else {})
    torch.manual_seed(0)
    model = model_class(config_class(**sizes | {"num_hidden_layers": len(types) if types else 2}))
    for layer in model.to(torch.bfloat16).model.layers:
        linears = [(name, m) for name, m in layer.named_modules() if type(m) is nn.Linear]
        assert len(linears) >= len(FORMATS)
        for (name, linear), format in zip(linears, itertools.cycle(FORMATS), strict=False):
            double = nested and format in ABSMAX_FORMATS
            layer.set_submodule(name, QuantLinear.from_linear(linear, format, double_quant=double))
    if checkpointing:
        model.gradient_checkpointing_enable()
    config = LoraConfig(r=8, target_modules="all-linear", lora_dropout=dropout, use_dora=dora)
    return mg.add_lora(model, config)


def test_every_pair_of_values_meets():
    for columns in itertools.combinations(zip(*COVER, strict=True), 2):
        values = [len(set(column)) for column in columns]
        assert len(set(zip(*columns, strict=True))) == values[0] * values[1]


@pytest.mark.parametrize(
    ("family", "checkpointing", "dropout", "dora", "nested", "packed", "mode"),
    COVER,
    ids=["-".join(str(value) for value in row) for row in COVER],
)
def test_one_outer_graph_and_the_bits_of_eager(family, checkpointing, dropout, dora, nested, packed, mode):
    """8 lengths, the last batch of one document: parameters and moments, and so all gradients, are eager
    mode's after each step; one outer graph, two inner ones per kind of layer, no recompile of either."""
    arguments = (family, checkpointing, dropout, dora, nested)
    regions = TrainStep(build(*arguments), mode=mode)
    eager = TrainStep(build(*arguments), mode="eager")
    kinds = len(set(LAYER_TYPES.get(family, [None])))
    for number, batch in enumerate(step_models.batches(packed)):
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            got = regions([batch], 1e-2)
        want = eager([batch], 1e-2)
        assert got.loss.item() == want.loss.item()
        assert got.grad_norm.item() == want.grad_norm.item() > 0
        assert torch.equal(regions.state.flat, eager.state.flat)
        assert torch.equal(regions.state.exp_avg, eager.state.exp_avg)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert (TRACES.signatures, TRACES.graphs, TRACES.retraced) == (kinds, 2 * kinds, 0)
    for batch in step_models.batches(packed, 2, seed=2):
        assert regions.evaluate(batch)[0].item() == eager.evaluate(batch)[0].item()
    assert counters["stats"]["unique_graphs"] == 2
    assert (TRACES.signatures, TRACES.graphs, TRACES.retraced) == (2 * kinds, 3 * kinds, 0)


def test_sixteen_bit_adapters_and_accumulation():
    """Slices hold float32 masters of 16-bit parameters; the micro-batches of a step share one graph."""
    steps = []
    for mode in ("graph", "eager"):
        model = build("llama")
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(torch.bfloat16)
        steps.append(TrainStep(model, mode=mode))
    rows = step_models.batches(True, 4)
    for pair in (rows[:2], rows[2:]):
        got, want = (step(pair, 1e-2) for step in steps)
        assert got.loss.item() == want.loss.item()
    assert torch.equal(steps[0].state.flat, steps[1].state.flat)
    assert counters["stats"]["unique_graphs"] == 1


def test_the_model_is_as_ever_beside_the_step():
    """The slices are the step's: a loss outside it reaches PEFT's parameters."""
    batch = step_models.batches(True, 1)[0]
    found = []
    for mode in ("graph", "eager"):
        step = TrainStep(build("llama"), mode=mode, backend="eager")
        step([batch], 1e-2)
        loss = step.model(input_ids=batch["input_ids"], labels=batch["labels"], use_cache=False).loss
        found.append(torch.autograd.grad(loss, step.state.parameters))
        step([batch], 1e-2)
        found[-1] += (step.state.flat,)
    assert all(torch.equal(got, want) for got, want in zip(*found, strict=True))


def test_misuse_is_named():
    model = build("llama")
    step = TrainStep(model, mode="graph", backend="eager")
    layer = next(iter(region_layers(model).values()))
    for mode in ("inductor", "inductor_whole_step", "per_layer"):
        with pytest.raises(ValueError, match=f"mode is '{mode}' on a model with regions, wanted 'graph'"):
            TrainStep(model, mode=mode)
    layer.input_layernorm.weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"input_layernorm\.weight is trained now; step\.rebuild"):
        step(step_models.batches(True, 1), 1e-2)
