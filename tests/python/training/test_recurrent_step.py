"""A training step of models with recurrent layers is one graph, with the bits of eager mode."""

import tempfile

import pytest
import torch
import torch._dynamo
from peft import LoraConfig, get_peft_model
from torch._dynamo.utils import counters

import monograph as mg
from monograph.hf.peft.lora_linear import LoraLinear
from monograph.packing import PackedCollator
from monograph.training import TrainStep
from monograph.training.regions import TRACES, forget
from support.recurrent_models import build

TARGETS = {
    "qwen3_next": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"],
    "qwen3_5": ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "v_proj"],
}


@pytest.fixture(autouse=True)
def fresh():
    forget()
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def trained(family, layers=4):
    """NF4 and LoRA on all projections of the recurrent layers, checkpointed."""
    with tempfile.TemporaryDirectory() as folder:
        build(family, layers, torch.bfloat16).save_pretrained(folder)
        model = mg.from_pretrained(folder, mg.MonographConfig("nf4", block_size=32))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=TARGETS[family], lora_dropout=0.0, init_lora_weights=False)
    model = mg.optimize(get_peft_model(model, config)).train()
    fused = [name for name, layer in model.named_modules() if isinstance(layer, LoraLinear)]
    names = {name.rpartition(".")[2] for name in fused}
    assert names == set(TARGETS[family])
    return model


def packings(count):
    """Rows of different lengths, each with other documents, of 1 to 90 tokens."""
    generator = torch.Generator().manual_seed(3)
    collate = PackedCollator(pad_to_multiple_of=8, max_documents=8)
    rows = []
    for i in range(count):
        lengths = [*torch.randint(1, 30, (1 + i % 5,), generator=generator).tolist(), 30 + 3 * i]
        rows.append(
            collate(
                [{"input_ids": torch.randint(3, 64, (n,), generator=generator).tolist()} for n in lengths]
            )
        )
    return rows


@pytest.mark.parametrize("family", TARGETS)
def test_a_graph_of_regions_over_twenty_packings(family):
    """One outer graph, two kinds of layers, no recompile; all gradients are eager mode's. Qwen3-Next has
    experts."""
    graph = TrainStep(trained(family), mode="graph")
    eager = TrainStep(trained(family), mode="eager")
    for number, batch in enumerate(packings(20)):
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            got = graph([batch], 1e-2)
        if number < 3:
            want = eager([batch], 1e-2)
            assert got.loss.item() == want.loss.item()
            assert got.grad_norm.item() == want.grad_norm.item() > 0
            assert torch.equal(graph.state.flat, eager.state.flat)
            assert torch.equal(graph.state.exp_avg, eager.state.exp_avg)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert (TRACES.signatures, TRACES.graphs, TRACES.retraced) == (2, 4, 0)


def test_a_flat_graph():
    flat = TrainStep(trained("qwen3_5", 2), mode="inductor", backend="aot_eager")
    eager = TrainStep(trained("qwen3_5", 2), mode="eager")
    for number, batch in enumerate(packings(3)):
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            got = flat([batch], 1e-2)
        want = eager([batch], 1e-2)
        assert got.loss.item() == want.loss.item()
        assert torch.equal(flat.state.flat, eager.state.flat)
        assert torch.equal(flat.state.exp_avg, eager.state.exp_avg)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
