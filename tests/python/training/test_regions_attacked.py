"""Where a region could differ from its layer without a word: caches, replaced tensors, hooks, tangents."""

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call

import monograph as mg
from monograph.training.regions import TRACES, forget, make_regions
from support.tiny_models import tiny_llama

pytestmark = pytest.mark.slow
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "num_hidden_layers": 2,
}
NORM = "model.layers.1.post_attention_layernorm.weight"


@pytest.fixture(autouse=True)
def fresh():
    forget()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def build():
    """Query and down projections are trained, everything else is frozen."""
    model = tiny_llama(**SMALL)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name or "down_proj" in name)
    return model.train()


def pair():
    return make_regions(build()), build()


def ids(length=8):
    return torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(2))


def loss_of(model, replaced=None):
    given = {"input_ids": ids(), "labels": ids(), "use_cache": False}
    return functional_call(model, replaced or {}, (), given).loss


def gradients(model, loss):
    return torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])


def assert_equal(found, wanted):
    assert all(torch.equal(f, w) for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_cache_is_dropped_only_where_transformers_drops_it(checkpointing):
    results = []
    models = pair()  # traces go with their layers
    for model in models:
        if checkpointing:
            model.gradient_checkpointing_enable()
        cache = model(input_ids=ids()[:1, :6], use_cache=True).past_key_values
        output = model(input_ids=ids()[:1, 6:7], past_key_values=cache, use_cache=True)
        length = 0 if output.past_key_values is None else output.past_key_values.get_seq_length()
        results.append((output.logits, length))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1] == (0 if checkpointing else 7)
    assert (TRACES.signatures > 0) == checkpointing


def test_backward_uses_the_frozen_tensors_of_its_forward():
    found = []
    models = pair()  # traces go with their layers
    for model in models:
        loss = loss_of(model, {NORM: torch.full((32,), 3.0)})
        found.append(gradients(model, loss))
        loss = loss_of(model)
        model.model.layers[1].post_attention_layernorm.weight = nn.Parameter(torch.full((32,), 5.0), False)
        found.append(gradients(model, loss))
    assert_equal(found[0], found[2])
    assert_equal(found[1], found[3])
    assert not torch.equal(found[0][0], found[1][0])
    assert TRACES.signatures == 1


def test_a_frozen_tensor_that_was_changed_in_place_is_named():
    for model, words in zip(pair(), ("post_attention_layernorm.weight", "inplace operation"), strict=True):
        loss = loss_of(model)
        with torch.no_grad():
            model.get_parameter(NORM).mul_(2)
        with pytest.raises(RuntimeError, match=words):
            gradients(model, loss)


def test_a_compiled_backward_names_a_frozen_tensor_that_changed():
    model = make_regions(build())
    compiled = torch.compile(model, backend="aot_eager")
    norm = model.model.layers[1].post_attention_layernorm
    for replaced in (False, True):
        loss = compiled(input_ids=ids(), labels=ids(), use_cache=False).loss
        if replaced:
            norm.weight = nn.Parameter(torch.full((32,), 5.0), False)
        else:
            with torch.no_grad():
                norm.weight.mul_(2)
        words = "replaced" if replaced else "in place"
        with pytest.raises(RuntimeError, match=rf"layers\.1.*post_attention_layernorm\.weight.*{words}"):
            loss.backward()


def scaled(x, by=1.0):
    return x * by


def test_functions_with_other_defaults_are_other_kinds():
    found = []
    models = pair()  # traces go with their layers
    for model in models:
        for layer, by in zip(model.model.layers, (1.0, 3.0), strict=True):
            del layer.mlp.act_fn
            layer.mlp.act_fn = type(scaled)(scaled.__code__, scaled.__globals__, "scaled", (by,))
        loss = loss_of(model)
        found.append((loss, *gradients(model, loss)))
    assert_equal(*found)
    assert TRACES.signatures == 2


def test_global_hooks_run_at_each_call():
    counts = []
    models = pair()  # traces go with their layers
    for model in models:
        called = []
        hook = nn.modules.module.register_module_forward_hook(lambda m, *_, c=called: c.append(type(m)))
        try:
            loss_of(model), loss_of(model)
        finally:
            hook.remove()
        counts.append([kind.__name__ for kind in called])
    assert counts[0] == counts[1]
    assert counts[0].count("LlamaMLP") == 4
    assert TRACES.signatures == 0


def test_tangents_of_frozen_tensors_reach_the_output():
    found = []
    models = pair()  # traces go with their layers
    for model in models:
        model.set_attn_implementation("eager")
        weight = model.get_parameter(NORM).detach()
        with forward_ad.dual_level():
            loss = loss_of(model, {NORM: forward_ad.make_dual(weight, torch.ones_like(weight))})
            found.append(forward_ad.unpack_dual(loss).tangent)
    assert found[1].item() != 0
    assert torch.equal(found[0], found[1])


def test_torchs_attention_without_dropout_is_allowed():
    model, plain = build(), build()
    mg.optimize(model, attention=False, elementwise=False, regions=True)
    found = []
    for one in (model, plain):
        loss = loss_of(one)
        found.append((loss, *gradients(one, loss)))
    assert_equal(*found)
    assert TRACES.signatures == 1


def test_torchs_attention_with_dropout_is_refused():
    model = make_regions(build())
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with pytest.raises(RuntimeError, match="random numbers"):
        loss_of(model)
