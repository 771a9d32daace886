"""The training step is one graph: counted on transformers' models with PEFT, against eager mode."""

import pytest
import torch
import torch._dynamo
from peft import LoraConfig
from torch._dynamo.utils import counters

import monograph as mg
from monograph.nn import replace_linears
from monograph.packing import PackedCollator
from monograph.training import TrainStep
from support.step_models import SMALL, batches, build
from support.tiny_models import tiny_llama

pytestmark = pytest.mark.slow
# Every value of every column, and every pair of the columns that meet in one operator (checkpointing with
# dropout and DoRA): family, checkpointing, dropout, DoRA, format, nested, packed, mode.
COVER = [
    ("llama", True, 0.05, False, "nf4", True, True, "inductor"),
    ("llama", False, 0.0, True, "fp4", False, False, "graph"),
    pytest.param("qwen3", True, 0.0, True, "mxfp8", False, False, "inductor", marks=pytest.mark.long),
    pytest.param(
        "qwen3", False, 0.05, False, "fp4", True, True, "inductor_whole_step", marks=pytest.mark.long
    ),
    pytest.param(
        "gemma3", True, 0.05, True, "mxfp4", False, True, "inductor_whole_step", marks=pytest.mark.long
    ),
    ("gemma3", False, 0.0, False, "nvfp4", False, False, "graph"),
    pytest.param("mistral", True, 0.0, False, "fp8-block", False, True, "inductor", marks=pytest.mark.long),
    ("mistral", False, 0.05, True, "nf4", False, True, "graph"),
    ("llama", True, 0.0, False, "nf4", True, False, "whole_step"),
]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("family", "checkpointing", "dropout", "dora", "format", "nested", "packed", "mode"),
    COVER,
)
def test_one_graph_and_the_losses_of_eager(
    family, checkpointing, dropout, dora, format, nested, packed, mode
):
    """8 batches of different lengths, the last of one document; one train graph
    and one eval graph, 0 breaks, 0 recompiles. aot_eager runs eager mode's operators in order: same bits."""
    arguments = (family, checkpointing, dropout, dora, format, nested)
    compiled = TrainStep(build(*arguments), mode=mode, backend="aot_eager")
    eager = TrainStep(build(*arguments), mode="eager")
    for number, batch in enumerate(batches(packed)):
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            got = compiled([batch], 1e-2)
        want = eager([batch], 1e-2)
        assert got.loss.item() == want.loss.item()
        assert got.grad_norm.item() == want.grad_norm.item() > 0
    assert counters["stats"]["unique_graphs"] == 1
    for number, batch in enumerate(batches(packed, 3, seed=2)):
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            assert compiled.evaluate(batch)[0].item() == eager.evaluate(batch)[0].item()
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


def test_accumulation_is_one_larger_batch():
    """Two micro-batches are the batch of both, across the boundary, without a recompile."""
    model = build()
    split = TrainStep(model, backend="aot_eager")
    rows = batches(True)
    for number in range(0, 6, 2):
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            split([rows[number], rows[number + 1]], 1e-2)
    with torch._dynamo.config.patch(error_on_recompile=True):
        split([rows[6]], 1e-2)
    assert counters["stats"]["unique_graphs"] == 1
    ids = [{"input_ids": list(range(n, n + 20))} for n in range(4)]
    collate = PackedCollator(max_documents=4)
    one, two = TrainStep(build(), mode="eager"), TrainStep(build(), mode="eager")
    whole = one([collate(ids)], 1e-2)
    halves = two([collate(ids[:1]), collate(ids[1:])], 1e-2)
    assert abs(whole.loss.item() - halves.loss.item()) <= 2**-20 * whole.loss.item()
    assert abs(whole.grad_norm - halves.grad_norm) <= 2**-6 * whole.grad_norm
    assert whole.targets == halves.targets == 76


@pytest.mark.long
@pytest.mark.parametrize("mode", ["inductor", "inductor_whole_step"])
def test_inductor_trains_as_eager_does(mode):
    compiled, eager = TrainStep(build(checkpointing=True), mode=mode), TrainStep(build(), mode="eager")
    for number, batch in enumerate(batches(True, 4)):
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            got = compiled([batch], 1e-2)
        want = eager([batch], 1e-2)
        # Inductor rounds a fused bf16 chain once where eager rounds each link: units of 2^-8 in the logits.
        assert abs(got.loss.item() - want.loss.item()) <= 2**-8 * want.loss.item()
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.long
def test_per_layer_mode_trains_the_same():
    compiled, eager = (
        TrainStep(build(), mode="per_layer", backend="aot_eager"),
        TrainStep(build(), mode="eager"),
    )
    for batch in batches(True, 3):
        assert compiled([batch], 1e-2).loss.item() == eager([batch], 1e-2).loss.item()
    # The first layer's input needs no gradient, the others' does; at most one graph a layer for each.
    assert 2 <= counters["stats"]["unique_graphs"] <= 2 * SMALL["num_hidden_layers"]


@pytest.mark.parametrize("trained", ["token rows", "embedding"])
def test_tied_embeddings_are_trained_in_one_graph(trained):
    """One module under two names (PEFT's token rows of a tied head) and one parameter in two modules."""

    def tied():
        sizes = SMALL | {"num_hidden_layers": 1, "tie_word_embeddings": True}
        model = tiny_llama(dtype=torch.bfloat16, **sizes)
        rows = {"trainable_token_indices": [3, 5, 7]} if trained == "token rows" else {}
        replace_linears(model, "nf4")
        found = mg.add_lora(model, LoraConfig(r=8, target_modules=["q_proj", "down_proj"], **rows))
        if trained == "embedding":
            model.get_input_embeddings().weight.requires_grad_(True)
        return found

    eager = TrainStep(tied(), mode="eager")
    want = [eager([batch], 1e-2).loss.item() for batch in batches(True, 4)]
    embedding = [name for name in eager.state.names if "embed_tokens" in name]
    assert len(embedding) == 1
    step = TrainStep(tied(), mode="whole_step", backend="aot_eager")
    before = dict(step.model.named_parameters())
    assert [step([batch], 1e-2).loss.item() for batch in batches(True, 4)] == want
    assert counters["stats"]["unique_graphs"] == 1
    assert torch.equal(step.state.flat, eager.state.flat)
    after = dict(step.model.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[name] is parameter for name, parameter in before.items())


def test_state_resumes_bit_for_bit():
    rows = batches(True)
    whole = TrainStep(build(dropout=0.05), mode="eager", weight_decay=0.1)
    want = [whole([row], 1e-2).loss.item() for row in rows]
    first = TrainStep(build(dropout=0.05), mode="eager", weight_decay=0.1)
    got = [first([row], 1e-2).loss.item() for row in rows[:4]]
    state = first.state_dict()
    second = TrainStep(build(dropout=0.05, rank=8), mode="eager", weight_decay=0.1)
    second.load_state_dict(state)
    got += [second([row], 1e-2).loss.item() for row in rows[4:]]
    assert got == want
    other = second.state_dict()
    assert all(torch.equal(other[name], value) for name, value in whole.state_dict().items())
    with pytest.raises(ValueError, match="missing"):
        second.load_state_dict({"steps": torch.zeros(())})


def test_adamw_is_torchs():
    """Clipping and decay included; biases are not decayed; the adapter's dtype may be bf16."""
    torch.manual_seed(0)
    model = build()
    step = TrainStep(model, mode="eager", weight_decay=0.1, max_grad_norm=0.5)
    names = step.state.names
    torch_parameters = [torch.nn.Parameter(p.detach().clone()) for p in step.state.parameters]
    optimizer = torch.optim.AdamW(torch_parameters, lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        gradients = [torch.randn_like(p) for p in torch_parameters]
        for parameter, gradient in zip(torch_parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        want = torch.nn.utils.clip_grad_norm_(torch_parameters, 0.5)
        optimizer.step()
        got = step.state.update(step.state.gathered(gradients), torch.tensor(1e-2), *step._hyper)
        assert abs(got - want) <= 1e-6 * want
    for name, ours, other in zip(names, step.state.parameters, torch_parameters, strict=True):
        assert (ours - other).abs().max() <= 2**-20, name
    before = step.state.flat.clone()
    step.state.update(torch.full_like(before, float("nan")), torch.tensor(1e-2), *step._hyper)
    assert torch.equal(step.state.flat, before)


def test_sixteen_bit_adapters_have_masters():
    model = build()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    step = TrainStep(model, mode="eager")
    first = step(batches(True, 2)[:1], 1e-3).loss
    for _ in range(8):
        last = step(batches(True, 2)[:1], 1e-3).loss
    assert last < first
    masters = step.state.views(step.state.flat)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            assert torch.equal(parameter, masters[name])


def test_the_adapter_is_saved_by_peft_from_the_shared_memory(tmp_path):
    model = build()
    step = TrainStep(model, mode="eager")
    step(batches(True, 2)[:1], 1e-2)
    model.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert len(stored) == len(step.state.names)
    assert any(tensor.abs().max() > 0 for name, tensor in stored.items() if "lora_B" in name)


def test_misuse_is_named():
    model = build()
    with pytest.raises(ValueError, match="mode is 'fast', wanted one of graph"):
        TrainStep(model, mode="fast")
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        TrainStep(model)
