"""Which attention mg.optimize leaves a model with: the user's, ours, or what the device has."""

import warnings

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import monograph as mg
from monograph.integrations.transformers import attention
from monograph.integrations.transformers.loading import default_attention


def build(device="cpu", **options):
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        **options,
    )
    with torch.device(device):
        return LlamaForCausalLM(config)


def after_optimize(model, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no LoRA layer here
        mg.optimize(model, **options)
    return model.config._attn_implementation


def test_a_choice_of_the_user_is_kept():
    assert after_optimize(build()) == "monograph"
    for chosen in ("eager", "flex_attention"):
        assert after_optimize(build(attn_implementation=chosen)) == chosen
        assert after_optimize(build(attn_implementation=chosen), attention=True) == "monograph"
    assert after_optimize(build(), attention=False) == "sdpa"


def test_no_score_matrix_on_a_device_without_a_kernel(monkeypatch):
    assert after_optimize(build("meta")) == "sdpa"
    with pytest.raises(ValueError, match="attention=True on meta: it has no kernel there"):
        after_optimize(build("meta"), attention=True)
    monkeypatch.setattr(attention, "has_kernel", lambda name, device: False)
    assert after_optimize(build()) == "sdpa"


@pytest.mark.parametrize(
    ("device_map", "chosen"),
    [
        (None, "monograph"),
        ("cpu", "monograph"),
        ({"": "cpu"}, "monograph"),
        ("cuda", None),
        ("auto", None),
        ({"": 0}, None),
        ({"model": "cpu", "lm_head": "cuda:0"}, None),
    ],
)
def test_a_device_without_a_kernel_keeps_the_attention_of_transformers(device_map, chosen):
    assert default_attention(device_map) == chosen
