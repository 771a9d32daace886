"""MLPs in slices of tokens: no bit of loss, gradient or adapter changes, one graph, and less memory."""

import copy

import pytest
import torch
import torch._dynamo
from peft import LoraConfig
from torch._dynamo.utils import counters

import monograph as mg
from monograph.bench.peak_memory import peak_bytes
from monograph.ops import token_slices
from monograph.ops.token_slices import SLICE, slices_of
from monograph.training import TrainStep
from monograph.training.regions import TRACES, forget
from monograph.training.token_slices import slice_mlps, sliced_mlps, whole_mlps
from support.region_models import build as build_regions
from support.region_models import ids, loss_and_gradients
from support.step_models import batches, build

ALL = LoraConfig(r=4, target_modules="all-linear")


@pytest.fixture(autouse=True)
def fresh():
    forget()
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def test_slices_cover_all_rows_and_none_has_one():
    for rows in (*range(2, 60), SLICE, SLICE + 1, SLICE + 2, 5 * SLICE + 1):
        for count in (0, 1, 2, 3, 7, 100):
            found = list(slices_of(rows, count))
            assert [row for part in found for row in range(part.start, part.stop)] == list(range(rows))
            assert all(part.stop - part.start >= 2 for part in found)
            assert len(found) <= count or not count
    assert len(list(slices_of(5 * SLICE, 0))) == 5
    assert len(list(slices_of(60, 7))) == 7
    assert list(slices_of(0, 3)) == []
    with pytest.raises(ValueError, match="slices is -1, wanted 0 or more"):
        list(slices_of(4, -1))


@pytest.mark.parametrize("format", ["nf4", "mxfp4"])
def test_gradients_have_the_bits_of_the_whole_mlp(format):
    model = build_regions(2, ALL, (format,))
    want, wanted = loss_and_gradients(model)
    for count in (1, 2, 5):
        slice_mlps(model, count)
        loss, gradients = loss_and_gradients(model)
        assert torch.equal(loss, want)
        for name, gradient in wanted.items():
            assert gradient.abs().max() > 0, name
            assert torch.equal(gradients[name], gradient), (count, name)
    assert not sliced_mlps(whole_mlps(model))
    assert torch.equal(loss_and_gradients(model)[0], want)


def test_without_gradients_and_in_a_copy():
    model = slice_mlps(build_regions(1, ALL), 3)
    with torch.no_grad():
        want = model(input_ids=ids()).logits
    assert torch.equal(model(input_ids=ids()).logits, want)
    assert torch.equal(copy.deepcopy(model)(input_ids=ids()).logits, want)
    assert torch.equal(model.eval()(input_ids=ids()).logits, want)


def trained(mode, slices, family="llama", **options):
    """Results of three steps over packed rows of different lengths, and the adapter."""
    forget()
    torch._dynamo.reset()
    counters.clear()
    model = build(family, **options)
    if slices:
        slice_mlps(model, slices)
    step = TrainStep(model, mode=mode)
    results = [step([batch], 1e-2) for batch in batches(packed=True, count=3)]
    if mode != "eager":
        assert counters["stats"]["unique_graphs"] == 1
        assert not counters["graph_break"]
    loss, _ = step.evaluate(batches(packed=True, count=1)[0])
    numbers = [(r.loss.item(), r.grad_norm.item()) for r in results]
    return [*numbers, loss.item()], {
        n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "checkpointing"), [("eager", True), ("graph", True), ("graph", False), ("whole_step", True)]
)
def test_steps_have_the_bits_of_whole_mlps(mode, checkpointing):
    """All linear layers have LoRA with dropout, whose mask is told where a slice begins."""
    options = {"checkpointing": checkpointing, "dropout": 0.3, "format": "nf4"}
    want, adapter = trained(mode, 0, **options)
    found, sliced = trained(mode, 5, **options)
    assert found == want
    for name, parameter in adapter.items():
        assert torch.equal(sliced[name], parameter), name
    if mode != "eager":
        called = {str(n.target) for traced in TRACES.by_number.values() for n in traced.forward.graph.nodes}
        assert "monograph.token_slices.default" in called
        assert TRACES.signatures == len(TRACES.by_number)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_other_families(family):
    want, adapter = trained("graph", 0, family, checkpointing=True)
    found, sliced = trained("graph", 4, family, checkpointing=True)
    assert found == want
    assert all(torch.equal(sliced[name], parameter) for name, parameter in adapter.items())


@pytest.mark.slow
def test_two_layers_share_a_trace_but_not_their_masks():
    """Streams are inputs of a trace: with those of the first layer in all of them other bits would come."""
    _, adapter = trained("eager", 0, dropout=0.5)
    _, sliced = trained("graph", 3, dropout=0.5)
    assert all(torch.equal(sliced[name], parameter) for name, parameter in adapter.items())
    assert TRACES.signatures <= 3  # a first step, one of evaluation


def test_opcheck():
    model = slice_mlps(build_regions(1, ALL), 3)
    seen = []
    (mlp,) = sliced_mlps(model)
    original = torch.ops.monograph.token_slices

    class Seen:
        def __call__(self, *given):
            seen.append(given)
            return original(*given)

    x = torch.randn(2, 6, 64, dtype=torch.bfloat16, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.monograph, "token_slices", Seen())
        mlp(x)
    (given,) = seen
    torch.library.opcheck(original.default, given)
    with pytest.raises(ValueError, match="body is 'none', wanted one of"):
        original("none", *given[1:])
    word, *rest = given
    with torch.no_grad():
        mlp(x.detach())  # a body without a backward
    last = str(int(word) + 1)
    with pytest.raises(RuntimeError, match="was told that no gradient is wanted"):
        torch.ops.monograph.token_slices_backward(last, *rest, torch.zeros_like(x))
    assert token_slices.SLICE == 1024


def test_what_cannot_be_sliced_is_refused_by_name():
    plain = build_regions(1, LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.0))
    assert torch.isfinite(loss_and_gradients(slice_mlps(plain, 2))[0])  # packed layers without LoRA
    with pytest.raises(ValueError, match="slices is 0, wanted a whole number"):
        slice_mlps(plain, 0)
    with pytest.raises(ValueError, match="Linear has no layer that transformers can checkpoint"):
        slice_mlps(torch.nn.Linear(2, 2))

    dropped = slice_mlps(build_regions(1, LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5)))
    with pytest.raises(RuntimeError, match="draws from torch's generator, wanted TrainStep"):
        loss_and_gradients(dropped)

    dora = slice_mlps(build_regions(1, LoraConfig(r=4, target_modules="all-linear", use_dora=True)))
    with pytest.raises(RuntimeError, match="LlamaMLP cannot be computed in slices of tokens: it computes"):
        loss_and_gradients(dora)

    hooked = slice_mlps(build_regions(1, ALL))
    sliced_mlps(hooked)[0].gate_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="gate_proj has a hook, wanted none"):
        loss_and_gradients(hooked)

    unfused = build_regions(1, ALL)
    for layer in unfused.get_base_model().model.layers:
        layer.mlp = torch.nn.Identity()
    with pytest.raises(ValueError, match="has the MLP Identity, wanted a gated MLP"):
        slice_mlps(unfused)


@pytest.mark.parametrize("mode", ["inductor", "inductor_whole_step", "per_layer"])
def test_modes_that_generate_code_are_refused(mode):
    with pytest.raises(
        ValueError, match=f"tiled_mlp with mode '{mode}', wanted one of graph, whole_step, eager"
    ):
        TrainStep(slice_mlps(build()), mode=mode)


@pytest.mark.slow
def test_a_dense_layer_of_torch_is_named_in_a_step():
    """A region that cannot be traced would otherwise run as plain layers, and say something else."""
    torch.manual_seed(0)
    from support.tiny_models import tiny_llama

    model = tiny_llama(dtype=torch.bfloat16, num_hidden_layers=1)
    model = mg.add_lora(model, LoraConfig(r=4, target_modules=["q_proj"]))
    step = TrainStep(slice_mlps(model), mode="graph")
    batch = {"input_ids": ids(), "labels": ids()}
    with pytest.raises(RuntimeError, match=r"computes aten::mm, whose rows may depend on how many there are"):
        step([batch], 1e-3)


SETUP = """
import monograph as mg
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM
from monograph.nn import replace_linears
from monograph.training import TrainStep
from monograph.training.token_slices import slice_mlps
config = LlamaConfig(hidden_size=128, intermediate_size=2048, num_attention_heads=4, num_key_value_heads=2,
                     vocab_size=256, num_hidden_layers=1, max_position_embeddings=8192)
model = LlamaForCausalLM(config).to(torch.bfloat16)
replace_linears(model, "nf4")
model.gradient_checkpointing_enable()
model = mg.add_lora(model, LoraConfig(r=4, target_modules="all-linear"))
if {slices}:
    slice_mlps(model, {slices})
step = TrainStep(model, mode="graph")
def run(tokens):
    ids = torch.zeros(1, tokens, dtype=torch.long)
    return step([{{"input_ids": ids, "labels": ids, "position_ids": torch.arange(tokens)[None]}}], 1e-3)
run(64)
"""


@pytest.mark.slow
def test_the_peak_of_a_step_falls():
    """5 tensors [4096, 2048] in bf16 are 80 MiB; an eighth of them is 10."""
    whole, sliced = (peak_bytes(SETUP.format(slices=count), "run(4096)") for count in (0, 8))
    assert whole - sliced > 40 * 2**20, (whole, sliced)
    assert sliced < 0.5 * whole, (whole, sliced)
