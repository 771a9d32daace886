"""A decoder layer as one operator: the bits of transformers' own layers, whatever is done to them."""

import copy
import pickle

import pytest
import torch
import torch._dynamo
from peft import LoraConfig
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import monograph as mg
from monograph.ops.formats import FORMATS
from monograph.ops.seeded_dropout import seed_dropouts
from monograph.training.regions import TRACES, forget, make_regions, region_layers, undo_regions
from support.region_models import (
    InPlace,
    assert_same,
    build,
    compiled,
    ids,
    loss_and_gradients,
    trained_b,
)

pytestmark = pytest.mark.slow
DROPPED = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.4)
ALL = LoraConfig(r=4, target_modules="all-linear")


@pytest.fixture(autouse=True)
def fresh():
    forget()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_every_format_has_the_bits_of_the_plain_layers():
    """All formats side by side in one layer; layers share their traces, lengths too."""
    formats = list(FORMATS)
    assert len(formats) <= 7  # linears of a layer
    model, plain = make_regions(build(3, ALL, formats)), build(3, ALL, formats)
    for length in (12, 31, 5):
        gradients = assert_same(model, plain, ids(length))
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())
    assert (TRACES.signatures, TRACES.graphs, TRACES.retraced) == (1, 2, 0)


def test_our_elementwise_operators_are_inside_the_regions():
    pair = [build(), build()]
    for model, regions in zip(pair, (True, False), strict=True):
        mg.optimize(model, regions=regions)
    assert_same(*pair)
    (traced,) = TRACES.by_number.values()
    called = {str(node.target) for node in traced.forward.graph.nodes}
    assert any("monograph.rms_norm" in name for name in called)


def test_what_peft_and_torch_do_to_a_layer_is_seen_at_the_next_call():
    pair = [make_regions(build()), build()]
    for model in pair:
        torch.manual_seed(3)
        model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "v_proj"], use_dora=True))
        trained_b(model)
    assert_same(*pair)
    assert TRACES.signatures == 1

    for model in pair:
        model.set_adapter("other")
    gradients = assert_same(*pair)
    assert {name.split(".")[-2] for name in gradients} == {"other"}

    for model in pair:
        model.base_model.set_adapter(["default", "other"])
    assert len(assert_same(*pair)) > len(gradients)

    # The forward decides what is differentiated, not the state of the layer when backward runs.
    found = []
    for model in pair:
        with model.disable_adapter():
            disabled = model(input_ids=ids(), labels=ids(), use_cache=False).loss
        found.append((disabled, loss_and_gradients(model)[0]))
    assert found[0][0].item() == found[1][0].item() != found[0][1].item()

    for model in pair:
        model.set_adapter("default")
        model.merge_adapter()
    assert_same(*pair)
    for model in pair:
        model.unmerge_adapter()
    assert_same(*pair)
    for model in pair:
        model.eval()
    assert_same(*pair)
    for model in pair:
        model.train().float()
    assert_same(*pair)


def test_backward_uses_the_trace_of_its_forward():
    """The adapter is off in the forward and on again when backward computes it once more."""
    found = []
    for model in (make_regions(build(checkpointing=True)), build()):
        norms = [p.requires_grad_(True) for name, p in model.named_parameters() if "layernorm" in name]
        with model.disable_adapter():
            loss = model(input_ids=ids(), labels=ids(), use_cache=False).loss
        found.append(torch.autograd.grad(loss, norms))
    assert all(torch.equal(got, want) and got.abs().max() > 0 for got, want in zip(*found, strict=True))


def test_hooks_run_at_each_call():
    model, calls = make_regions(build()), []
    layer = next(iter(region_layers(model).values()))
    handle = layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    loss_and_gradients(model)
    loss_and_gradients(model)
    assert len(calls) == 2
    handle.remove()
    loss_and_gradients(model)
    assert len(calls) == 2
    assert TRACES.signatures == 1


def test_a_compiled_step_refuses_what_came_later_by_name():
    model = make_regions(build())
    step = compiled(model)
    before = step(ids())
    layer = next(iter(region_layers(model).values()))
    handle = layer.mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"layers\.0#\d+: mlp has a hook that came after"):
        step(ids())
    handle.remove()
    layer.input_layernorm.weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"new \['input_layernorm.weight'\]"):
        step(ids())
    torch.compiler.reset()
    assert torch.equal(step(ids()), before)


def test_under_a_trainers_compile():
    """As transformers' Trainer does it: the module compiled, autocast, `config.use_cache` off."""
    model, plain = make_regions(build()).float(), build().float()
    for each in (model, plain):
        each.config.use_cache = False
    step = torch.compile(model, backend="aot_eager", fullgraph=True)
    for length in (12, 17):
        found = []
        for run, each in ((step, model), (plain, plain)):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = run(input_ids=ids(length), labels=ids(length)).loss
            found.append(
                [loss, *torch.autograd.grad(loss, [p for p in each.parameters() if p.requires_grad])]
            )
        assert all(torch.equal(got, want) for got, want in zip(*found, strict=True))
    assert TRACES.graphs == 2


def test_doctor_looks_inside():
    tokens = [{"input_ids": ids(n), "labels": ids(n)} for n in (12, 17)]
    report = mg.doctor(make_regions(build(2)), tokens, quiet=True)
    assert (report.graphs, report.regions, report.region_kinds, report.inner_graphs) == (1, 2, 1, 2)
    assert report.holds
    assert "inner graphs    2  (wanted 2), of 2 regions" in str(report)
    assert report.saved_bytes["activations bfloat16"] > 0
    torch._dynamo.reset()

    class Dequantising(LlamaDecoderLayer):
        def forward(self, hidden_states, **options):
            dense = self.mlp.gate_proj.dequantize()
            return super().forward(hidden_states, **options) + 0 * (hidden_states @ dense.t() @ dense)

    report = mg.doctor(make_regions(with_class(build(), Dequantising)), tokens, quiet=True)
    assert any("(96, 64) torch.bfloat16 in a region" in copy for copy in report.weight_copies)
    assert not report.holds


def test_torchs_own_dropouts_draw_once_for_forward_and_backward():
    """Without a TrainStep masks come from torch's generator: repeatable, and the same in a recomputation."""
    model = make_regions(build(config=DROPPED))
    torch.manual_seed(5)
    want, wanted = loss_and_gradients(model)
    other, _ = loss_and_gradients(model)
    assert other.item() != want.item()
    model.gradient_checkpointing_enable()
    torch.manual_seed(5)
    loss, gradients = loss_and_gradients(model)
    assert loss.item() == want.item()
    assert all(torch.equal(gradients[name], wanted[name]) for name in wanted)


def test_two_forwards_before_their_backwards_keep_their_masks():
    model = make_regions(build(config=DROPPED, checkpointing=True))
    seed = seed_dropouts(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    alone, losses = [], []
    for number in (1, 2):
        seed.fill_(number)
        alone.append(torch.autograd.grad(model(input_ids=ids(), labels=ids()).loss, parameters))
    for number in (1, 2):
        seed.fill_(number)
        losses.append(model(input_ids=ids(), labels=ids()).loss)
    for loss, want in zip(losses, alone, strict=True):
        got = torch.autograd.grad(loss, parameters)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_copies_are_layers_of_their_own_and_regions_can_be_undone():
    model = build()
    own = type(model.get_base_model().model.layers[0])
    make_regions(model)
    want, _ = loss_and_gradients(model)
    copied = copy.deepcopy(model)
    layer, other = (next(iter(region_layers(m).values())) for m in (model, copied))
    assert layer.region_word != other.region_word
    assert type(layer).__name__ == "LlamaDecoderLayer"
    assert isinstance(layer, LlamaDecoderLayer)
    with torch.no_grad():
        other.mlp.down_proj.lora_B["default"].weight.zero_()
    assert loss_and_gradients(copied)[0].item() != want.item()
    assert loss_and_gradients(model)[0].item() == want.item()
    loaded = pickle.loads(pickle.dumps(layer))
    assert loaded.region_word not in (layer.region_word, other.region_word)
    undo_regions(model)
    assert not region_layers(model)
    assert type(layer) is own
    assert loss_and_gradients(model)[0].item() == want.item()


class Numbered(LlamaDecoderLayer):
    def forward(self, hidden_states, **options):
        return super().forward(hidden_states, **options) * (1.0 + self.self_attn.layer_idx % 2)


class Random(LlamaDecoderLayer):
    def forward(self, hidden_states, **options):
        return super().forward(hidden_states + torch.rand_like(hidden_states), **options)


class OwnInPlace(LlamaDecoderLayer):
    """Changes what it made itself, after it was read and before it is read again."""

    def forward(self, hidden_states, **options):
        result = super().forward(hidden_states, **options)
        before = result + 1
        result *= result.mean(dim=-1, keepdim=True)
        result[:, ::2].mul_(2)  # a part of it
        return before + result


def with_class(model, layer_class):
    for layer in model.get_base_model().model.layers:
        layer.__class__ = layer_class
    return model


def test_a_layer_that_computes_with_its_number_has_a_trace_for_each():
    model, plain = (with_class(build(2), Numbered) for _ in range(2))
    assert_same(make_regions(model), plain)
    assert TRACES.signatures == 2


@pytest.mark.parametrize(
    ("layer_class", "words"),
    [(Random, r"draws random numbers with aten\.rand_like"), (InPlace, r"in place with aten\.mul_")],
)
def test_what_cannot_be_repeated_is_refused_by_name(layer_class, words):
    model = make_regions(with_class(build(), layer_class))
    with pytest.raises(
        RuntimeError, match=rf"layers\.0#\d+ \({layer_class.__name__}\) cannot be traced.*{words}"
    ):
        loss_and_gradients(model)


def test_a_layer_may_change_what_it_made_itself():
    assert_same(make_regions(with_class(build(2), OwnInPlace)), with_class(build(2), OwnInPlace))


def test_generation_with_a_cache_is_the_plain_layers():
    model, plain = make_regions(build()).eval(), build().eval()
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids(), **options), plain.generate(ids(), **options))
    with pytest.raises(ValueError, match="Linear has no layer that transformers can checkpoint"):
        make_regions(nn.Linear(2, 2))


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_the_operator_keeps_torchs_rules(mode):
    """Schema, fake, autograd and dynamic tracing; results share no memory with arguments or each other."""
    model = make_regions(build())
    region = torch.ops.monograph.region
    layer = next(iter(region_layers(model).values()))
    hidden = torch.randn(2, 7, 64, dtype=torch.bfloat16, requires_grad=True)
    rotary = model.get_base_model().model.rotary_emb(hidden, torch.arange(7)[None])
    rotary = [part.detach() for part in rotary]
    trained = layer.region_refresh()
    text = "((b'*',), {'attention_mask': None, 'position_embeddings': (b'*', b'*')})"
    parameters = getattr(layer, f"region_tensors_{trained}")
    arguments = (layer.region_word, text, trained, mode, "", hidden, None, rotary, parameters)
    torch.library.opcheck(region, arguments)
    results = region(*arguments)
    memory = [t.untyped_storage().data_ptr() for t in (*results, hidden, *rotary, *parameters)]
    assert len(set(memory)) == len(memory)
    assert (len(results) > 2) == (mode == "keep")
    want = layer.region_original.forward(layer, hidden, position_embeddings=tuple(rotary))
    assert torch.equal(results[0], want)
