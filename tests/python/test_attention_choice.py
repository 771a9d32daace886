"""Which attention mg.optimize leaves a model with: the user's, ours, or what the device has."""

import warnings

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import monograph as mg
from monograph.integrations.transformers import attention


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
    with pytest.raises(ValueError, match="attention=True on meta, where monograph attention has no kernel"):
        after_optimize(build("meta"), attention=True)
    monkeypatch.setattr(attention, "has_kernel", lambda device: False)
    assert after_optimize(build()) == "sdpa"
    monkeypatch.setattr(attention, "has_kernel", lambda device: True)
    assert after_optimize(build("meta")) == "monograph"
