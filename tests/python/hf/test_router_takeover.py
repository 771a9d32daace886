"""Routers of transformers on linear and choose_experts: which are known, their values and gradients."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, OlmoeConfig, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from monograph.hf.transformers.elementwise import take_over
from monograph.hf.transformers.fused_router import FusedRouter, take_router
from support.elementwise_models import IDS, SMALL

EXPERTS = {"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 32}


def build(config_class, **changes):
    torch.manual_seed(3)
    config = config_class(**(SMALL | EXPERTS | {"initializer_range": 0.3} | changes))
    model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    model.set_experts_implementation("eager")  # the others know no float64
    return model


def routers(model):
    return [m for m in model.modules() if isinstance(m, FusedRouter)]


@pytest.mark.parametrize("config_class", [Qwen3MoeConfig, OlmoeConfig])
@pytest.mark.parametrize("normalise", [False, True])
def test_routers_are_recognised(config_class, normalise):
    theirs = build(config_class, norm_topk_prob=normalise)
    ours, wide = copy.deepcopy(theirs), copy.deepcopy(theirs).double()
    assert take_over(ours).routers == take_over(ours).routers == 2
    assert [m.monograph_normalise for m in routers(ours)] == [normalise] * 2
    assert list(ours.state_dict()) == list(theirs.state_dict())
    found = []
    for model in (ours, theirs, wide):
        x = model.get_input_embeddings()(IDS).detach().requires_grad_()
        loss = model(inputs_embeds=x, labels=IDS).loss
        found.append([loss.detach(), *torch.autograd.grad(loss, x)])
    for got, want, exact in zip(*found, strict=True):
        off, their_off = ((t.double() - exact).norm() / exact.norm() for t in (got, want))
        assert off <= 2 * their_off + 2**-20


def test_what_is_no_softmax_of_one_product_stays():
    class Scaled(Qwen3MoeTopKRouter):
        def forward(self, hidden_states):
            logits, weights, ids = super().forward(hidden_states)
            return logits, 2 * weights, ids

    config = Qwen3MoeConfig(**(SMALL | EXPERTS))
    scaled, known = Scaled(config), Qwen3MoeTopKRouter(config)
    assert [take_router(m) for m in (scaled, known)] == [False, True]
    assert take_over(build(GptOssConfig, num_local_experts=12)).routers == 0


def test_a_trained_router_and_other_types_are_the_class_s():
    theirs = build(Qwen3MoeConfig)
    ours = copy.deepcopy(theirs)
    take_over(ours)
    for one in (theirs, ours):
        for layer in one.model.layers:
            layer.mlp.gate.weight.requires_grad_()
    router, plain = (m.model.layers[0].mlp.gate for m in (ours, theirs))
    x = torch.randn(5, 64)
    for t in (x, x.double()):
        if t.dtype == torch.float64:
            router.double(), plain.double()
        assert all(torch.equal(a, b) for a, b in zip(router(t), plain(t), strict=True))


def test_a_graph_gives_the_bits_of_eager():
    model = build(Qwen3MoeConfig)
    take_over(model)
    router = routers(model)[0]
    x = torch.randn(7, 64, requires_grad=True)
    found = []
    for call in (router, torch.compile(router, fullgraph=True, backend="aot_eager")):
        _, weights, ids = call(x)
        found.append((weights, ids, *torch.autograd.grad(weights.square().sum(), x)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_token_is_routed_alike_in_any_batch():
    model = build(Qwen3MoeConfig).bfloat16()
    take_over(model)
    router, x = routers(model)[0], torch.randn(64, 64).bfloat16()
    whole = router(x)
    for row in (0, 17, 63):
        assert all(
            torch.equal(a, b[row : row + 1]) for a, b in zip(router(x[row : row + 1]), whole, strict=True)
        )
