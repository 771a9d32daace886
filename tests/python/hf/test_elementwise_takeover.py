"""Elementwise operators under a model: which modules are known, transformers' results, one graph, hooks."""

import copy
import io

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Gemma3TextConfig, LlamaConfig, Olmo2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import monograph as mg
from monograph.hf.transformers.attention import put_on
from monograph.hf.transformers.elementwise import take_over
from monograph.training.regions import TRACES, forget, make_regions
from support.elementwise_models import IDS, SMALL, build

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("config_class", "norms", "norm", "activation", "attentions", "rotaries"),
    [
        (LlamaConfig, 5, (False, True), 0, 2, 1),
        (Qwen3Config, 9, (False, True), 0, 2, 1),
        (Gemma3TextConfig, 13, (True, False), 1, 2, 1),  # a table for each type of layer
        (Olmo2Config, 9, (False, False), 0, 0, 0),  # one norm for all heads; angles in float32
    ],
)
def test_modules_are_recognised(config_class, norms, norm, activation, attentions, rotaries):
    model = build(config_class)
    names = list(model.state_dict())
    wide = copy.deepcopy(model).double()
    eager = copy.deepcopy(model)
    assert take_over(model) == take_over(model) == (norms, 2, attentions, attentions, rotaries, 0)
    assert {m.monograph_norm for m in model.modules() if hasattr(m, "monograph_norm")} == {norm}
    assert model.model.layers[1].mlp.monograph_activation == activation
    assert list(model.state_dict()) == names
    gradients = []
    for one in (model, eager, wide):
        loss = one(input_ids=IDS, labels=IDS).loss
        loss.backward()
        gradients.append([loss.detach(), *(p.grad for p in one.parameters())])
    for ours, theirs, exact in zip(*gradients, strict=True):
        off, their_off = ((g.double() - exact).norm() / exact.norm() for g in (ours, theirs))
        assert off <= 2 * their_off + 2**-20


class ScaledRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        return 1.01 * super().forward(hidden_states)


class ClampedMLP(LlamaMLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=7)) * self.up_proj(x))


class DroppingMLP(LlamaMLP):
    def forward(self, x):
        return self.down_proj(
            nn.functional.dropout(self.act_fn(self.gate_proj(x)), 0.5, self.training) * self.up_proj(x)
        )


class RefusingRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        raise ValueError("wanted three dimensions")


def test_unknown_variants_are_left_alone():
    config, watched = LlamaConfig(**SMALL), LlamaMLP(LlamaConfig(**SMALL))
    watched.act_fn.register_forward_hook(lambda *_: None)
    owned = LlamaRMSNorm(64)
    owned.forward = lambda x: x
    left = [
        ScaledRMSNorm(64),
        RefusingRMSNorm(64),
        nn.RMSNorm(64),
        nn.LayerNorm(64),
        ClampedMLP(config),
        DroppingMLP(config),
        LlamaMLP(LlamaConfig(**(SMALL | {"hidden_act": "relu"}))),
        LlamaRMSNorm(64).to("meta"),
        watched,
        owned,
    ]
    assert take_over(nn.ModuleList(left)) == (0, 0, 0, 0, 0, 0)
    assert take_over(nn.ModuleList([LlamaRMSNorm(64), LlamaMLP(config)])) == (1, 1, 0, 0, 0, 0)


def adapted(config_class, dtype):
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(build(config_class, dtype, num_hidden_layers=1), lora)
    return mg.optimize(model)


@pytest.mark.parametrize("config_class", [Qwen3Config, Gemma3TextConfig])
def test_a_graph_gives_the_bits_of_eager(config_class):
    torch._dynamo.reset()
    model = adapted(config_class, torch.bfloat16).train()
    graph = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for number, ids in enumerate((IDS, IDS[:, :7].contiguous())):
        found = []
        for one in (model, graph):
            model.zero_grad()
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                loss = one(input_ids=ids, labels=ids).loss
                loss.backward()
            found.append([loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_regions_trace_one_kind_of_layer():
    forget()
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(build(dtype=torch.bfloat16), lora)
    plain = mg.optimize(model).train()
    regions = mg.optimize(copy.deepcopy(plain), regions=True)
    found = []
    for one in (plain, regions):
        loss = one(input_ids=IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in one.parameters() if p.requires_grad)])
    assert TRACES.signatures == 1
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_hooks_run_and_other_dtypes_are_the_class_s():
    model, calls = build(), []
    plain = copy.deepcopy(model)
    take_over(model)
    # The frequencies stay those of the operators, whose last bit is not torch's.
    plain.model.rotary_emb.inv_freq.copy_(model.model.rotary_emb.inv_freq)
    want = plain.double()(IDS).logits
    layer = model.model.layers[0]
    for module in (layer.input_layernorm, layer.mlp, layer.mlp.gate_proj, layer.mlp.act_fn):
        module.register_forward_hook(lambda module, *_: calls.append(type(module).__name__))
    before = model(IDS).logits
    assert [calls[0], calls[1], calls[3]] == ["LlamaRMSNorm", "Linear", "LlamaMLP"]
    assert len(calls) == 4  # the activation's too
    assert (before - want).abs().max() <= 2**-16
    assert torch.equal(model.double()(IDS).logits, want)
    model.float()
    for module in model.modules():
        module._forward_hooks.clear()
    fused, copies = model(IDS).logits, [copy.deepcopy(model)]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies.append(torch.load(file, weights_only=False))
    for other in copies:
        assert torch.equal(other(IDS).logits, fused)
        with torch.no_grad():
            other.model.norm.weight.mul_(2)
        assert not torch.equal(other(IDS).logits, fused)
    assert torch.equal(model(IDS).logits, fused)


@pytest.mark.parametrize(
    ("config_class", "dtype"),
    [
        (LlamaConfig, torch.float16),
        (Qwen3Config, torch.bfloat16),
        (Qwen3Config, torch.float16),
        (Gemma3TextConfig, torch.bfloat16),  # in float16 transformers' own gradients are not finite
    ],
)
def test_autocast_gives_the_dtypes_and_values_of_transformers(config_class, dtype):
    """Values and gradients within eight units of the narrow dtype; regions have the bits of the layers."""
    forget()
    eager = build(config_class)
    ours = copy.deepcopy(eager)
    take_over(ours)
    put_on(ours, True)
    regions = make_regions(copy.deepcopy(ours))
    found = []
    for model in (eager, ours, regions):
        with torch.autocast("cpu", dtype=dtype):
            got = model.train()(input_ids=IDS, labels=IDS, use_cache=False)
        got.loss.backward()
        found.append([got.logits.detach(), *(p.grad for p in model.parameters())])
    for want, one, region in zip(*found, strict=True):
        assert one.dtype == want.dtype
        assert (one - want).norm() <= 8 * torch.finfo(dtype).eps * want.norm()
        assert torch.equal(region, one)


def test_an_activation_put_in_later_counts():
    model, ours = build(), build()
    take_over(ours)
    for one in (model, ours):
        for layer in one.model.layers:
            layer.mlp.act_fn = nn.ReLU()
    torch.testing.assert_close(ours(input_ids=IDS, labels=IDS).loss, model(input_ids=IDS, labels=IDS).loss)
    for one in (model, ours):
        del one.model.layers[0].mlp.act_fn
        one.model.layers[0].mlp.act_fn = torch.tanh  # no module
    torch.testing.assert_close(ours(input_ids=IDS, labels=IDS).loss, model(input_ids=IDS, labels=IDS).loss)


def test_hooks_on_all_modules_run_as_ever():
    counts = []
    for model in (build(Qwen3Config), build(Qwen3Config)):
        if counts:
            assert take_over(model).attentions == 2
        called = []
        hook = nn.modules.module.register_module_forward_hook(lambda m, *_, c=called: c.append(type(m)))
        try:
            model(IDS)
        finally:
            hook.remove()
        counts.append(sorted(kind.__name__ for kind in called))
    assert counts[0] == counts[1]
