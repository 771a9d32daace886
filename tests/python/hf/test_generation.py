"""generate() with attn_implementation="monograph" and every kind of cache, against eager attention."""

import pytest
import torch
import torch._dynamo
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import monograph.hf.transformers.attention  # noqa: F401  (registers the name)

pytestmark = pytest.mark.slow
WINDOWS = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 7}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, WINDOWS | {"head_dim": 16}),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, WINDOWS | {"head_dim": 16}),
}


def build(name, implementation):
    config, model, options = FAMILIES[name]
    torch.manual_seed(0)
    return model(
        config(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=128,
            max_position_embeddings=64,
            initializer_range=0.2,
            attn_implementation=implementation,
            **options,
        )
    ).eval()


def generate(model, padded, cache, tokens):
    ids = torch.randint(1, 128, (2, 11), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, : 4 if padded else 0] = 0
    result = model.generate(
        ids,
        attention_mask=mask,
        cache_implementation=cache,
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return result.sequences, torch.stack(result.logits)


def expect_equal(got, want):
    assert torch.equal(got[0], want[0])
    # fp32 sums of two layers in another order: measured 1e-6
    assert (got[1] - want[1]).abs().max() <= 1e-5 * want[1].abs().max()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_each_cache_equals_eager_attention(name, cache):
    """The window (7) is shorter than the prompt (11): sliding caches are full from the start."""
    for padded in (True, False):
        want = generate(build(name, "eager"), padded, cache, 12)
        expect_equal(generate(build(name, "monograph"), padded, cache, 12), want)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_compiled_static_cache_equals_eager_attention(name):
    """Models with one mask: the table comes back as `attention_mask` and was read as padding."""
    want = generate(build(name, "eager"), True, "static", 5)
    model = build(name, "monograph")
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    expect_equal(generate(model, True, "static", 5), want)
