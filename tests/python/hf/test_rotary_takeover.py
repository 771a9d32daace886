"""Elementwise operators under a model: rotary positions in attentions, residual sums in decoder layers."""

import copy
import io

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModel,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GlmConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    NemotronConfig,
    Qwen2Config,
    Qwen2VLTextConfig,
    Qwen3Config,
    Qwen3VLTextConfig,
)
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

import monograph as mg
from monograph.hf.transformers.activation_checkpointing import enable_checkpointing
from monograph.hf.transformers.elementwise import take_over
from monograph.hf.transformers.fused_attention import FusedAttention, take_attention
from monograph.hf.transformers.fused_layer import FusedLayer, take_layer
from monograph.hf.transformers.fused_norm import FusedNorm, take_norm
from monograph.training.regions import forget
from support.elementwise_models import IDS, SMALL, build


def attentions(model):
    return [m for m in model.modules() if isinstance(m, FusedAttention)]


@pytest.mark.parametrize(
    "config_class", [LlamaConfig, MistralConfig, Qwen2Config, Gemma2Config, NemotronConfig]
)
def test_positions_have_the_bits_of_transformers(config_class):
    """Without norms of heads; Nemotron turns half of a head."""
    eager = build(config_class, torch.bfloat16).train()
    ours = copy.deepcopy(eager)
    assert sum(take_attention(m) for m in ours.modules()) == 2
    want, got = (m(input_ids=IDS, labels=IDS) for m in (eager, ours))
    assert torch.equal(got.logits, want.logits)
    # Gradients of q and k are rounded once, transformers' three times.
    for one in (got, want):
        one.loss.backward()
    wide = copy.deepcopy(eager).double()
    wide.zero_grad()
    wide(input_ids=IDS, labels=IDS).loss.backward()
    off, their_off = (
        sum((p.grad.double() - w.grad).norm() for p, w in zip(m.parameters(), wide.parameters(), strict=True))
        for m in (ours, eager)
    )
    assert off <= 1.05 * their_off


@pytest.mark.parametrize("config_class", [Qwen3Config, Gemma3TextConfig])
def test_the_norms_of_heads_are_part_of_it(config_class):
    """The same bits as norm and positions by two operators."""
    apart = build(config_class, torch.bfloat16).eval()
    for module in list(apart.modules()):
        take_norm(module)
    fused, calls = copy.deepcopy(apart), []
    assert sum(take_attention(m) for m in fused.modules()) == 2
    assert torch.equal(fused(IDS).logits, apart(IDS).logits)
    with torch.profiler.profile() as profile:
        fused(IDS)
    counted = {event.key: event.count for event in profile.key_averages()}
    assert counted["monograph::rotary"] == 2
    assert counted["monograph::rms_norm"] == sum(isinstance(m, FusedNorm) for m in fused.modules()) - 4
    norm = attentions(fused)[0].q_norm
    norm.register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(fused(IDS).logits, apart(IDS).logits)
    assert calls == [1]


@pytest.mark.parametrize("config_class", [Qwen2VLTextConfig, Qwen3VLTextConfig])
def test_positions_in_sections(config_class):
    """MRoPE: the model merges time, height and width into one cos and one sin."""
    torch.manual_seed(3)
    sections = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    model = AutoModel.from_config(config_class(**(SMALL | {"rope_parameters": sections}))).eval()
    wide = copy.deepcopy(model).double()
    places = torch.stack([IDS % 5, IDS % 7, IDS % 11])
    want, plain = (
        model(input_ids=IDS, position_ids=p).last_hidden_state for p in (places, places[:1].expand(3, -1, -1))
    )
    assert not torch.allclose(want, plain, atol=1e-3)  # the sections matter
    exact = wide(input_ids=IDS, position_ids=places).last_hidden_state
    assert take_over(model).attentions == take_over(model).layers == 2
    got = model(input_ids=IDS, position_ids=places).last_hidden_state
    off, their_off = ((t.double() - exact).norm() / exact.norm() for t in (got, want))
    assert off <= 2 * their_off + 2**-20


def test_residual_sums_have_the_bits_of_sum_and_norm():
    for config_class in (LlamaConfig, Gemma2Config):
        apart = build(config_class, torch.bfloat16).train()
        for module in list(apart.modules()):
            take_norm(module)
        fused = copy.deepcopy(apart)
        assert sum(take_layer(m) for m in fused.modules()) == 2
        losses = [m(input_ids=IDS, labels=IDS).loss for m in (apart, fused)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        for p, q in zip(apart.parameters(), fused.parameters(), strict=True):
            assert (p.grad - q.grad).norm() <= 2**-5 * p.grad.norm()  # dx + dsum is rounded once


def test_a_checkpointed_layer_is_taken_over_as_any_other():
    """transformers 5.23 checkpoints in the forward of the class, 5.22 in its call."""
    model = build(LlamaConfig, torch.bfloat16).train()
    enable_checkpointing(model)
    for module in list(model.modules()):
        take_norm(module)
    assert sum(take_layer(m) for m in model.modules()) == 2


class ScaledQueries(LlamaAttention):
    def forward(self, hidden_states, position_embeddings=None, **kwargs):
        cos, sin = position_embeddings
        return super().forward(hidden_states, position_embeddings=(1.5 * cos, sin), **kwargs)


class HalfResidual(LlamaDecoderLayer):
    def forward(self, hidden_states, **kwargs):
        return super().forward(0.5 * hidden_states, **kwargs)


def test_unknown_variants_are_left_alone():
    config = LlamaConfig(**SMALL)
    config._attn_implementation = "sdpa"
    owned, known = LlamaAttention(config, 0), LlamaAttention(config, 0)
    owned.forward = lambda x: x
    for module in (ScaledQueries(config, 0), owned):
        assert not take_attention(module)
    assert take_attention(known)
    layers = [HalfResidual(config, 0), LlamaDecoderLayer(config, 0)]
    for layer in layers:
        assert take_norm(layer.post_attention_layernorm)
    assert [take_layer(layer) for layer in layers] == [False, True]
    # Interleaved and rounded once; interleaved and half of the head; a factor before the sum.
    for config_class in (CohereConfig, GlmConfig):
        assert take_over(build(config_class)).attentions == 0
    assert take_over(build(GraniteConfig, residual_multiplier=0.5))[2:4] == (2, 0)


def test_a_cache_and_positional_arguments():
    eager = build(Qwen3Config).eval()
    ours = copy.deepcopy(eager)
    take_over(ours)
    tokens = [
        m.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=6, do_sample=False)
        for m in (eager, ours)
    ]
    assert torch.equal(*tokens)
    hidden, places = torch.randn(1, 4, 64), [torch.randn(1, 4, 16) for _ in range(2)]
    results = [m.model.layers[0].self_attn(hidden, places, None)[0] for m in (eager, ours)]
    torch.testing.assert_close(*results)


def test_regions_and_pickles_over_it():
    forget()
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    plain = get_peft_model(build(Qwen3Config, torch.bfloat16), lora)
    mg.optimize(plain).train()
    regions = mg.optimize(copy.deepcopy(plain), regions=True)
    file = io.BytesIO()
    torch.save(regions, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert len(attentions(loaded)) == sum(isinstance(m, FusedLayer) for m in loaded.modules()) == 2
    found = []
    for one in (plain, regions, loaded):
        loss = one(input_ids=IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in one.parameters() if p.requires_grad)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_mixed_dtypes_take_the_code_of_transformers():
    eager = build(Qwen3Config).eval()
    ours = copy.deepcopy(eager)
    take_over(ours)
    for m in (eager, ours):
        for layer in m.model.layers:
            layer.self_attn.q_norm.bfloat16()
    torch.testing.assert_close(ours(IDS).logits, eager(IDS).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen3Config, Gemma3TextConfig])
def test_checkpointing_and_recorded_outputs(config_class):
    """Checkpointed layers have the gradients of those that are not; hidden states are found."""
    plain = build(config_class, attn_implementation="eager")
    theirs = plain(IDS, output_hidden_states=True, output_attentions=True)
    take_over(plain)
    ours = plain(IDS, output_hidden_states=True, output_attentions=True)
    for name in ("hidden_states", "attentions"):
        for a, b in zip(getattr(ours, name), getattr(theirs, name), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    checkpointed = copy.deepcopy(plain)
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for model in (plain, checkpointed):
        model.train()(input_ids=IDS, labels=IDS).loss.backward()
    for p, q in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
